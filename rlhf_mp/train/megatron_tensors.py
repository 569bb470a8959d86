"""Where Megatron-Core keeps what: its tensors by the planner's components.

Source: Megatron-Core 0.16, distributed/param_and_grad_buffer.py, optimizer/optimizer.py, distrib_optimizer.py and
cpu_offloading/hybrid_optimizer.py.
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
            parts = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.numel() > 1}
            if "master_param" in parts:  # of an optimizer that steps on the host
                yield Component.master, parts.pop("master_param")
            yield from ((Component.optimizer, moment) for moment in parts.values())
        on_host = getattr(part.optimizer, "cpu_copy_map_grad", {})
        yield from ((Component.gradients, gradient) for gradient in on_host.values())
