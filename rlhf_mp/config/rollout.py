"""The SGLang engines, and how new weights reach them."""

from dataclasses import dataclass
from typing import Any, Literal

from rlhf_mp.config.knob import knob, section
from rlhf_mp.config.multi_turn import MultiTurnConfig


@dataclass
class ValSamplingConfig:
    """Sampling for validation."""

    n: int = knob(1, "responses per prompt", ge=1)
    temperature: float = knob(0.0, "0: greedy", ge=0)
    top_p: float = knob(1.0, "nucleus", gt=0, le=1)


@dataclass
class RolloutConfig:
    """The SGLang engines."""

    name: Literal["sglang"] = knob("sglang", "rollout engine")
    n: int = knob(8, "responses per prompt", ge=1)
    temperature: float = knob(1.0, "log-probs are of the distribution after temperature, here and in training", gt=0)
    top_p: float = knob(1.0, "nucleus", gt=0, le=1)
    top_k: int = knob(-1, "most likely tokens kept; -1: all", ge=-1)
    reproducible: bool = knob(True, "seed every response by itself, so a resumed run samples the same tokens")
    dtype: Literal["float32", "bfloat16"] | None = knob(None, "of the engine's weights; unset: model.dtype")
    tensor_model_parallel_size: int = knob(1, "GPUs per engine", ge=1)
    num_engines: int | None = knob(
        None,
        "SGLang servers; unset: GPUs / tensor_model_parallel_size, of as many as train or as rollout.nnodes have",
        ge=1,
    )
    nnodes: int = knob(
        0, "machines that have engines and no ranks, beside trainer.nnodes; 0: engines are on the ranks' machines", ge=0
    )
    allow_cross_node: bool = knob(
        False,
        "an engine of more than trainer.n_gpus_per_node GPUs lies on several machines; its layers' sums then cross "
        "the network",
    )
    gpu_memory_utilization: float = knob(0.5, "share of a GPU for weights and KV cache of the engine", gt=0, le=1)
    free_cache_engine: bool | None = knob(
        None, "engines give weights and KV cache back while the trainer works; unset: where they share its GPUs"
    )
    max_num_seqs: int = knob(256, "responses sampled at once by one engine", ge=1)
    max_num_batched_tokens: int = knob(8192, "tokens per prefill", ge=1)
    max_model_len: int | None = knob(None, "context length; unset: prompt + response", ge=1)
    max_total_tokens: int | None = knob(None, "KV cache slots per engine; unset: from memory, on CPU from need", ge=1)
    enable_chunked_prefill: bool = knob(True, "cut long prompts")
    enforce_eager: bool = knob(False, "no CUDA graphs")
    cudagraph_capture_sizes: list[int] | None = knob(None, "batch sizes to capture; unset: SGLang's own", ge=1)
    engine_args: dict[str, Any] = knob({}, "passed on to sglang.launch_server as they are")
    startup_timeout_s: float = knob(600, "an engine that is not up by then is an error", gt=0)
    max_staleness: int = knob(
        0, "step s is sampled once weight version s - max_staleness is live; 0: synchronous (docs/async.md)", ge=0
    )
    over_sample_rate: float = knob(
        0.0,
        "prompts sampled beyond train_batch_size, as a share of it; the last to end are aborted and come again",
        ge=0,
    )
    request_timeout_s: float = knob(3600, "one group of responses may take so long", gt=0)
    health_check_interval_s: float = knob(10, "between two questions whether an engine is well", gt=0)
    health_check_timeout_s: float = knob(
        60, "an engine that does not answer such a question in time hangs: it is killed and restarted", gt=0
    )
    val_kwargs: ValSamplingConfig = section(ValSamplingConfig)
    multi_turn: MultiTurnConfig = section(MultiTurnConfig)


@dataclass
class WeightSyncConfig:
    """How new weights reach the engines."""

    transport: Literal["tensor", "distributed", "disk"] | None = knob(
        None,
        "tensor: CUDA IPC or shared memory, same host; distributed: NCCL or gloo; disk: safetensors; "
        "unset: tensor where an engine shares the trainer's memory, else distributed",
    )
    adapter_only: bool = knob(
        False,
        "with model.lora_rank, a swap brings the adapter and engines compute it beside their base; off: merged into it",
    )
    bucket_mb: int = knob(256, "MB (10^6 bytes) of two buffers: one is filled while the other is sent", ge=1)
    canary_tolerance: float | None = knob(
        None, "largest mean difference of canary log-probs; unset: 1e-4 in float32, 0.05 in bfloat16", gt=0
    )
    timeout_s: float = knob(600, "one swap may take so long", gt=0)
