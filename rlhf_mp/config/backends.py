"""What only one training backend has: the sections ``deepspeed`` and ``megatron`` of a trained model."""

from dataclasses import dataclass
from typing import Literal

from rlhf_mp.config.knob import knob


@dataclass
class OffloadConfig:
    """ZeRO settings under the names used for FSDP."""

    param_offload: bool = knob(False, "keep parameters in host memory, fetch a layer at a time (ZeRO-3)")
    optimizer_offload: bool = knob(False, "keep optimizer state in host memory and step there")
    reshard_after_forward: bool = knob(True, "true: ZeRO-3; false: ZeRO-2, whole parameters on every rank")
    forward_prefetch: bool = knob(True, "fetch the next layer's parameters while this one computes")


@dataclass
class DeepSpeedConfig:
    """What only DeepSpeed has."""

    zero_stage: int | None = knob(None, "0-3; unset: 3, or 2 with fsdp_config.reshard_after_forward=false", ge=0, le=3)
    reduce_bucket_size: int = knob(50_000_000, "elements reduced at once", ge=1)
    prefetch_bucket_size: int = knob(50_000_000, "elements fetched ahead (ZeRO-3)", ge=0)
    offload_device: Literal["cpu", "nvme"] = knob("cpu", "where fsdp_config's offloads keep things")
    nvme_path: str | None = knob(None, "folder on a fast local disk, with offload_device=nvme")
    param_persistence_threshold: int = knob(100_000, "smaller parameters stay whole on every rank (ZeRO-3)", ge=0)


@dataclass
class MegatronConfig:
    """What only Megatron has. The ranks that tensor, pipeline and context parallelism leave over are data-parallel."""

    tensor_model_parallel_size: int = knob(1, "ranks that share every matrix", ge=1)
    pipeline_model_parallel_size: int = knob(1, "ranks that share the layers", ge=1)
    virtual_pipeline_model_parallel_size: int | None = knob(
        None, "parts of the layers on each pipeline rank, interleaved for less idle time; unset: one", ge=2
    )
    context_parallel_size: int = knob(1, "ranks that share every sequence", ge=1)
    sequence_parallel: bool | None = knob(
        None, "share the work between matrices along the sequence too; unset: with tensor parallelism"
    )
    use_distributed_optimizer: bool = knob(True, "share optimizer state among data-parallel ranks")
    recompute: Literal["full", "selective"] = knob(
        "full", "what enable_gradient_checkpointing recomputes: whole layers, or attention alone"
    )
    transformer_impl: Literal["auto", "local", "te"] = knob(
        "auto", "layers: torch's (local) or Transformer Engine's (te); auto: te on a GPU where it is installed"
    )

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
