"""Where DeepSpeed keeps what: its tensors by the planner's components.

Source: DeepSpeed 0.19, runtime/zero/stage_1_and_2.py and stage3.py, runtime/bf16_optimizer.py.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from rlhf_mp.planner.term import Component

Held = Iterator[tuple[Component, Tensor]]


def deepspeed_tensors(engine: Any) -> Held:
    """Of one rank now; views of one storage may come several times."""
    stage = engine.zero_optimization_stage()
    yield from _weights(engine.module, stage)
    yield from ((Component.master, part) for part in master_weights(engine))
    yield from ((Component.gradients, part) for part in _gradients(engine) if part is not None)
    if stage > 0 and hasattr(engine.optimizer, "ipg_buckets"):  # a frozen model under ZeRO-3 has no gradients to reduce
        yield from ((Component.buckets, part) for part in _reduce_buffers(engine.optimizer))
    if engine.basic_optimizer is not None:
        for state in engine.basic_optimizer.state.values():
            # counters are one number, moments as large as what they belong to
            parts = (value for value in state.values() if isinstance(value, Tensor) and value.numel() > 1)
            yield from ((Component.optimizer, part) for part in parts)


def master_weights(engine: Any) -> list[Tensor]:
    stage = engine.zero_optimization_stage()
    if stage == 3 and hasattr(engine.optimizer, "fp32_partitioned_groups_flat"):
        return engine.optimizer.fp32_partitioned_groups_flat
    return engine.optimizer.single_partition_of_fp32_groups if stage in (1, 2) else []


def _weights(module: nn.Module, stage: int) -> Held:
    for parameter in module.parameters():
        if stage < 3:
            yield Component.weights, parameter.data
            continue
        yield Component.weights, parameter.ds_tensor
        if parameter.data.numel() == parameter.ds_numel:  # small ones stay whole (param_persistence_threshold)
            yield Component.gathered, parameter.data


def _gradients(engine: Any) -> Iterator[Tensor | None]:
    """Wherever a stage keeps them between backward pass and step."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    yield from (parameter.grad for parameter in engine.module.parameters())
    yield from (part.grad for part in master_weights(engine))
    if stage == 3 and hasattr(optimizer, "grad_partitions_flat_buffer"):
        yield optimizer.grad_partitions_flat_buffer
    elif stage in (1, 2):
        for parts in optimizer.averaged_gradients.values():
            yield from ([parts] if isinstance(parts, Tensor) else parts or [])


def _reduce_buffers(optimizer: Any) -> Iterator[Tensor]:
    for bucket in optimizer.ipg_buckets.values():
        buffer = bucket.buffer
        yield from [buffer] if isinstance(buffer, Tensor) else buffer or []
