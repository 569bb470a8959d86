"""Bytes of the tensors that come and go: an allocator's peak where there is no allocator to ask."""

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Sums the sizes of storages made while it is active, for as long as they live.

    Args:
        known: tensors that were there before. Views of them come by too and do not count.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                self._track(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def _track(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known.add(storage)
        self.now += size
        weakref.finalize(storage, self._release, size)

    def _release(self, size: int) -> None:
        self.now -= size
