"""Gradient checkpointing: what the forward pass keeps of a layer, and what the backward pass computes again."""

from collections import defaultdict, deque
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from rlhf_mp.train.activation_offload import decoder_layers

MATRIX_PRODUCTS = frozenset({torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm})
ATTENTION = ("aten::_scaled_dot_product_", "flash_attn::")
"""Of torch whatever the kernel, and of the package flash-attn."""

Kept = defaultdict[Any, deque[Any]]
"""What operations of one layer gave, in the order in which they ran."""


def checkpoint_layers(module: nn.Module, *, every: int, recompute: Literal["full", "selective"] = "full") -> None:
    """Recompute every so-many-th layer in the backward pass, from the first on; the others keep their activations.

    Args:
        recompute: "full" keeps a layer's input alone; "selective" what its matrix products and attention give, too,
            and computes again only what is cheap: norms, activation functions, rotations, sums.
    """
    settings: dict[str, Any] = {"use_reentrant": False}
    if recompute == "selective":
        settings["context_fn"] = _keep_and_give_back
    module.gradient_checkpointing_enable(settings)
    for index, layer in enumerate(decoder_layers(module)):
        layer.gradient_checkpointing = index % every == 0


def _keep_and_give_back() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Around a layer's forward pass, and around its recomputation.

    torch's own pair, create_selective_checkpoint_contexts, wants every operation to run as often again; the hooks by
    which ZeRO-3 gathers and releases weights run other ones in the backward pass.
    """
    kept: Kept = defaultdict(deque)
    return _Keep(kept), _GiveBack(kept)


def _is_dear(operation: Any) -> bool:
    return operation.overloadpacket in MATRIX_PRODUCTS or operation.name().startswith(ATTENTION)


class _Keep(TorchDispatchMode):
    def __init__(self, kept: Kept):
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if _is_dear(func):
            self.kept[func].append(_alias(result))
        return result


class _GiveBack(TorchDispatchMode):
    def __init__(self, kept: Kept):
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.kept[func].popleft() if _is_dear(func) else func(*args, **(kwargs or {}))


def _alias(result: Any) -> Any:
    """Without the graph that autograd is about to hang on ``result``."""
    return tree_map_only(Tensor, lambda x: x.detach(), result)
