"""How new weights reach the engines."""

from dataclasses import dataclass
from typing import Literal

from rlhf_mp.config.knob import knob


@dataclass
class WeightSyncConfig:
    """How new weights reach the engines."""

    transport: Literal["tensor", "distributed", "disk"] | None = knob(
        None,
        "tensor: CUDA IPC or shared memory, same host; distributed: NCCL or gloo; disk: safetensors; "
        "unset: tensor on one machine, distributed on several",
    )
    bucket_mb: int = knob(256, "MB (10^6 bytes) of two buffers: one is filled while the other is sent", ge=1)
    canary_tolerance: float | None = knob(
        None, "largest mean difference of canary log-probs; unset: 1e-4 in float32, 0.05 in bfloat16", gt=0
    )
    timeout_s: float = knob(600, "one swap may take so long", gt=0)
