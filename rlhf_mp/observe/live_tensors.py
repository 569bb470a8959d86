"""What is alive right now, by what it is for: whose fault it is when memory runs out.

Every tensor that Python can reach is counted, each storage once. Tensors that only the autograd graph holds have no
Python object: they are the difference to what the allocator says.
"""

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

KINDS = ("weights", "gradients", "optimizer", "other tensors")


def live_bytes(device: torch.device) -> dict[str, int]:
    """Bytes on ``device``, by kind, the largest first."""
    objects = [x for x in gc.get_objects() if isinstance(x, (Tensor, nn.Module, torch.optim.Optimizer))]
    modules = [x for x in objects if isinstance(x, nn.Module)]
    optimizers = [x for x in objects if isinstance(x, torch.optim.Optimizer)]
    weights = [p for module in modules for p in (*module._parameters.values(), *module._buffers.values())]
    kinds = {
        "weights": [*weights, *_attributes(weights, "ds_tensor")],
        "gradients": [*_attributes(weights, "grad"), *_attributes(weights, "main_grad")],
        "optimizer": [t for optimizer in optimizers for t in _of_optimizer(optimizer)],
        "other tensors": [x for x in objects if isinstance(x, Tensor)],
    }
    seen: set[int] = set()
    held = {kind: sum(_new_storages(tensors, device, seen)) for kind, tensors in kinds.items()}
    return dict(sorted(held.items(), key=lambda item: -item[1]))


def _attributes(tensors: Iterable[Tensor | None], name: str) -> Iterator[Any]:
    """``main_grad`` is Megatron's, ``ds_tensor`` DeepSpeed's part of a partitioned weight."""
    for tensor in tensors:
        if tensor is not None and (name == "grad" or name in vars(tensor)):
            yield getattr(tensor, name)


def _of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Moments, and the master weights it changes where they are not the model's own."""
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from state.values()


def _new_storages(tensors: Iterable[Any], device: torch.device, seen: set[int]) -> Iterator[int]:
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or tensor.device.type != device.type or tensor.layout != torch.strided:
            continue
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage.nbytes()
