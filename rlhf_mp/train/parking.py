"""What ranks hold and do not need while engines sample, off their GPU and back on it.

Storages are emptied and filled again. What views them - flat buffers, partitions, an optimizer's moments - need not
know, so that one way serves every backend.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, UntypedStorage
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory

from rlhf_mp.data.types import Sums
from rlhf_mp.errors import OutOfMemory
from rlhf_mp.planner.term import SCRATCH, SENT, Component
from rlhf_mp.train.base import Scorer

ALIGNMENT = 512  # bytes, of each storage's place on the host


class HostArena:
    """One piece of this process's memory, which a GPU reads and writes without a copy in between.

    Not from torch's own allocator of such memory, which rounds up to powers of two.
    """

    def __init__(self, device: torch.device):
        self.pinned = device.type == "cuda"
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size: int) -> None:
        """Room for ``size`` bytes; what was there before is lost where it has to grow.

        Raises:
            OutOfMemory: this machine has not so much, or not so much that may be locked.
        """
        if size <= self.bytes.numel():
            return
        if self.pinned and self.bytes.numel():
            unpin_memory(self.bytes.data_ptr())
        self.bytes = torch.empty(0, dtype=torch.uint8)  # two of them at once might not fit
        try:
            self.bytes = torch.empty(size, dtype=torch.uint8)
            if self.pinned:
                pin_memory(self.bytes.data_ptr(), size)
        except RuntimeError as error:  # torch has no type of its own for either
            raise OutOfMemory(
                f"the host has no {size / 2**30:.1f} GiB for what this rank parks there while engines sample: {error}; "
                f"fix: trainer.offload_during_rollout=false{', or ulimit -l unlimited' if self.pinned else ''}"
            ) from None


@dataclass
class Parked:
    """One storage that is out."""

    storage: UntypedStorage
    size: int  # bytes
    copy: Tensor | None  # on the host; None: scratch, which is zero when it is back


@dataclass
class Parking:
    """Of one rank. Takes out all that its models have on ``device`` but the weights of the first, which swaps send."""

    models: Sequence[Scorer] = ()  # none: nothing is ever parked
    device: torch.device = torch.device("cpu")
    everyone: Callable[[], object] = lambda: None  # collective: returns once every rank has come to it
    is_out: bool = field(default=False, init=False)  # alike on all ranks, whatever each of them had

    def __post_init__(self) -> None:
        self._arena = HostArena(self.device)
        self._parked: list[Parked] = []

    def out(self) -> Sums:
        """Collective. When it returns, the memory is free on every GPU. Does nothing where it is out already."""
        if self.is_out or not self.models:
            return {}
        start = time.perf_counter()
        self._parked = self._copies()
        self._wait()
        for parked in self._parked:
            parked.storage.resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.is_out = True
        freed, copied = sum(p.size for p in self._parked), sum(p.size for p in self._parked if p.copy is not None)
        metrics = {"park/freed_bytes": (freed, 1), "park/copied_bytes": (copied, 1)}
        metrics |= _speed("park/out", copied, time.perf_counter() - start)
        self.everyone()
        return metrics

    def back(self) -> Sums:
        """As it was before. Does nothing where nothing is out."""
        if not self.is_out:
            return {}
        start, copied = time.perf_counter(), 0
        for parked in self._parked:
            parked.storage.resize_(parked.size)
            if parked.copy is None:
                _bytes_of(parked.storage).zero_()
            else:
                _bytes_of(parked.storage).copy_(parked.copy, non_blocking=True)
                copied += parked.size
        self._wait()
        self._parked = []
        self.is_out = False
        return _speed("park/back", copied, time.perf_counter() - start)

    def _copies(self) -> list[Parked]:
        """Begin to copy everything that leaves."""
        found = self._storages()
        self._arena.reserve(sum(_aligned(storage.nbytes()) for storage, is_scratch in found if not is_scratch))
        parked, place = [], 0
        for storage, is_scratch in found:
            size, copy = storage.nbytes(), None
            if not is_scratch:
                copy = self._arena.bytes[place : place + size]
                copy.copy_(_bytes_of(storage), non_blocking=True)
                place += _aligned(size)
            parked.append(Parked(storage, size, copy))
        return parked

    def _storages(self) -> list[tuple[UntypedStorage, bool]]:
        """Each once, and whether it is nothing but scratch."""
        sent = {storage._cdata for component, storage in self._held(self.models[0]) if component in SENT}
        found: dict[int, tuple[UntypedStorage, bool]] = {}
        for model in self.models:
            for component, storage in self._held(model):
                if storage._cdata not in sent and storage.nbytes():
                    _, is_scratch = found.get(storage._cdata, (storage, True))
                    found[storage._cdata] = storage, is_scratch and component in SCRATCH
        return list(found.values())

    def _held(self, model: Scorer) -> Iterator[tuple[Component, UntypedStorage]]:
        for component, tensor in model.tensors():
            storage = tensor.untyped_storage()
            # What a CPU maps from a checkpoint's file is the file's own: it has no memory to give back.
            if storage.device.type == self.device.type and storage.resizable():
                yield component, storage

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _speed(name: str, num_bytes: int, seconds: float) -> Sums:
    return {f"{name}_s": (seconds, 1), f"{name}_gb_per_s": (num_bytes / seconds / 1e9, 1)}
