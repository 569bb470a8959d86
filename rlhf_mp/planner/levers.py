"""What can still be turned to save memory in a run's config, the cheapest in speed first. Pure."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from typing import Any

from rlhf_mp.config.schema import ModelConfig, RunConfig
from rlhf_mp.phase import Phase

MODEL, ACTOR, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout"))
COMPUTING = frozenset({Phase.score, Phase.train})
EVERYWHERE = frozenset(Phase)


@dataclass(frozen=True)
class Lever:
    """One change to a config."""

    key: str
    value: Any
    cost: str
    saves: float | None = None  # bytes of a rank in the phase asked about; None: the planner cannot say

    def __str__(self) -> str:
        saves = "" if self.saves is None else f"saves about {self.saves / 2**30:.1f} GiB by plan; "
        return f"{self.key}={_yaml(self.value)} ({saves}{self.cost})"


@dataclass(frozen=True)
class _Rule:
    """When a lever is still off, and what it is turned to."""

    key: str
    phases: frozenset[Phase]
    cost: str
    turned: Callable[[RunConfig, Any], Any]  # (config, value now) -> value to try; None: it is on, or means nothing


def _on(applies: Callable[[RunConfig], bool] = lambda config: True) -> Callable[[RunConfig, Any], Any]:
    return lambda config, now: True if not now and applies(config) else None


def _is(*strategies: str) -> Callable[[RunConfig], bool]:
    return lambda config: config.actor_rollout_ref.actor.strategy in strategies


def _zero(lowest: int) -> Callable[[RunConfig], bool]:
    return lambda config: _is("deepspeed")(config) and config.actor_rollout_ref.actor.deepspeed.zero_stage >= lowest


def _halved(lowest: Callable[[RunConfig], int]) -> Callable[[RunConfig, int], int | None]:
    return lambda config, now: now // 2 if now // 2 >= lowest(config) else None


def _longest(config: RunConfig) -> int:
    return config.data.max_prompt_length + config.data.max_response_length


def _by_tokens(config: RunConfig, now: int) -> int | None:
    return _halved(_longest)(config, now) if config.actor_rollout_ref.actor.use_dynamic_bsz else None


def _by_sequences(config: RunConfig, now: int) -> int | None:
    return None if config.actor_rollout_ref.actor.use_dynamic_bsz else _halved(lambda _: 1)(config, now)


def _steps_on_host(config: RunConfig) -> bool:
    """Whether the backend can, for this config."""
    distributed = config.actor_rollout_ref.actor.megatron.use_distributed_optimizer
    return _zero(1)(config) or (_is("megatron")(config) and distributed)


def _has_reference_copy(config: RunConfig) -> bool:
    policy = config.actor_rollout_ref
    return _is("deepspeed")(config) and policy.actor.use_kl_loss and not policy.model.lora_rank


RULES = (
    _Rule(
        f"{MODEL}.logits_chunk_mb",
        COMPUTING,
        "computes each chunk's logits twice",
        lambda config, now: ModelConfig().logits_chunk_mb if now == 0 else None,
    ),
    _Rule(
        "actor_rollout_ref.ref.fsdp_config.param_offload",
        EVERYWHERE - {Phase.rollout},
        "fetches the reference model from the host while it scores",
        _on(_has_reference_copy),
    ),
    _Rule(f"{ACTOR}.fsdp_config.optimizer_offload", EVERYWHERE, "steps the optimizer on the host", _on(_steps_on_host)),
    _Rule(f"{MODEL}.enable_gradient_checkpointing", frozenset({Phase.train}), "a third more arithmetic", _on()),
    _Rule(
        f"{MODEL}.recompute",
        frozenset({Phase.train}),
        "a third more arithmetic",
        lambda config, now: (
            "full" if now == "selective" and config.actor_rollout_ref.model.enable_gradient_checkpointing else None
        ),
    ),
    _Rule(f"{ACTOR}.ppo_max_token_len_per_gpu", COMPUTING, "more, smaller micro-batches", _by_tokens),
    _Rule(f"{ACTOR}.ppo_micro_batch_size_per_gpu", COMPUTING, "more, smaller micro-batches", _by_sequences),
    _Rule(
        f"{MODEL}.enable_activation_offload",
        frozenset({Phase.train}),
        "moves activations over the host link",
        _on(_is("deepspeed", "torch")),
    ),
    _Rule(f"{ACTOR}.fsdp_config.param_offload", EVERYWHERE, "fetches every layer from the host", _on(_zero(3))),
    _Rule(
        "trainer.offload_during_rollout",
        frozenset({Phase.rollout, Phase.sync}),
        "copies optimizer state to the host and back once a step",
        _on(lambda config: config.engines_sleep(on_gpu=True)),
    ),
    _Rule(
        f"{ROLLOUT}.gpu_memory_utilization",
        EVERYWHERE,
        "fewer responses sampled at once",
        lambda config, now: round(now - 0.1, 2) if now > 0.3 else None,
    ),
    _Rule(f"{ROLLOUT}.enforce_eager", frozenset({Phase.rollout}), "slower sampling, without CUDA graphs", _on()),
    _Rule(f"{ROLLOUT}.max_num_seqs", frozenset({Phase.rollout}), "fewer at once", _halved(lambda _: 8)),
    _Rule(
        "actor_rollout_ref.weight_sync.bucket_mb",
        frozenset({Phase.sync}),
        "more, smaller transfers",
        _halved(lambda _: 16),
    ),
)
"""From what costs least to what costs most."""


def levers_off(
    config: RunConfig, phase: Phase, needed: Callable[[RunConfig, Phase], float] | None = None
) -> Iterator[Lever]:
    """What would make ``phase`` need less, the cheapest first.

    Args:
        needed: bytes of a rank by plan; levers that save nothing by it are left out.
    """
    before = needed(config, phase) if needed else None
    for rule in RULES:
        value = rule.turned(config, _read(config, rule.key)) if phase in rule.phases else None
        if value is None:
            continue
        saves = before - needed(_changed(config, rule.key, value), phase) if needed else None
        if saves is None or saves > 0:
            yield Lever(rule.key, value, rule.cost, saves)


def _read(config: RunConfig, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def _changed(config: RunConfig, key: str, value: Any) -> RunConfig:
    other = deepcopy(config)
    *path, name = key.split(".")
    setattr(reduce(getattr, path, other), name, value)
    return other


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
