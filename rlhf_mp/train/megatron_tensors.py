"""Where Megatron-Core keeps what: its tensors by the planner's components.

Source: Megatron-Core 0.16, distributed/param_and_grad_buffer.py, optimizer/optimizer.py and distrib_optimizer.py.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from rlhf_mp.planner.term import Component

MASTER = ("shard_fp32_from_float16_groups", "fp32_from_float16_groups")
"""With the distributed optimizer, and without. Float32 weights are their own master copy."""


def megatron_tensors(models: Sequence[nn.Module], optimizer: Any | None) -> Iterator[tuple[Component, Tensor]]:
    """Of one rank now; views of one storage may come several times."""
    for model in models:
        for parameter in model.parameters():
            yield Component.weights, parameter.data
            if hasattr(parameter, "main_grad"):
                yield Component.gradients, parameter.main_grad
    for part in getattr(optimizer, "chained_optimizers", [optimizer] if optimizer is not None else []):
        groups = (group for name in MASTER if hasattr(part, name) for group in getattr(part, name))
        yield from ((Component.master, weight) for group in groups for weight in group if weight is not None)
        for state in part.optimizer.state.values():
            parts = (value for value in state.values() if isinstance(value, Tensor) and value.numel() > 1)
            yield from ((Component.optimizer, moment) for moment in parts)
