"""The SGLang servers of a plan, from a config."""

from typing import Any

from rlhf_mp.config.schema import RunConfig
from rlhf_mp.errors import ConfigError, Problem
from rlhf_mp.planner import job as planned

CACHE_WIDTHS = {"fp8_e5m2": 1.0, "fp8_e4m3": 1.0, "bf16": 2.0, "bfloat16": 2.0, "fp4_e2m1": 0.5}
"""Bytes an element, by SGLang's --kv-cache-dtype."""


def engine_of(config: RunConfig, sequence: int, *, on_gpu: bool) -> planned.Engine:
    rollout = config.actor_rollout_ref.rollout
    width = 2 if rollout.dtype == "bfloat16" else 4
    slots = rollout.max_total_tokens
    if slots is None and not on_gpu:
        slots = rollout.max_num_seqs * (sequence + 1)  # what the server is told to take on a CPU
    return planned.Engine(
        tp=rollout.tensor_model_parallel_size,
        num_engines=rollout.num_engines,
        memory_fraction=rollout.gpu_memory_utilization,
        max_sequences=rollout.max_num_seqs,
        sequence=sequence,
        max_cache_tokens=slots,
        weight_bytes=width,
        cache_bytes=_cache_width(rollout.engine_args, width),
        cuda_graphs=on_gpu and not rollout.enforce_eager,
        graph_batch=max(rollout.cudagraph_capture_sizes or [rollout.max_num_seqs]),
        prefill_tokens=rollout.max_num_batched_tokens,
        sleeps=config.engines_sleep(on_gpu),
        on_own_gpus=config.trainer.placement == "disjoint",
        span=config.machines_per_engine,
        own_machines=config.engine_machines,
    )


def reward_server_of(config: RunConfig) -> planned.Engine:
    """Its cache is what one batch takes (rollout/reward_server.py)."""
    own = config.reward_model
    width = 2 if own.model.dtype == "bfloat16" else 4
    tokens = max(own.rollout.max_num_batched_tokens, config.data.max_length)
    return planned.Engine(
        tp=own.rollout.tensor_model_parallel_size,
        num_engines=own.rollout.num_engines,
        max_sequences=0,  # nothing is sampled: no logits
        sequence=config.data.max_length,
        max_cache_tokens=tokens,
        weight_bytes=width,
        cache_bytes=_cache_width(own.rollout.engine_args, width, "reward_model.rollout"),
        cuda_graphs=False,
        prefill_tokens=tokens,
        on_own_gpus=config.trainer.placement == "disjoint",
    )


def _cache_width(engine_args: dict[str, Any], of_weights: float, section: str = "actor_rollout_ref.rollout") -> float:
    """Bytes of a cached element.

    Raises:
        ConfigError: a type that SGLang knows and the planner does not.
    """
    if "kv_cache_dtype" not in engine_args:
        return of_weights
    chosen = engine_args["kv_cache_dtype"]
    widths = CACHE_WIDTHS | {"auto": of_weights}
    if chosen not in widths:
        key = f"{section}.engine_args.kv_cache_dtype"
        raise ConfigError([Problem(key, chosen, "the planner does not know its size", f"one of {', '.join(widths)}")])
    return widths[chosen]
