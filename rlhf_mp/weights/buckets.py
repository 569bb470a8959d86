"""Tensors packed into one flat buffer of bytes and back. Standard layout: one after the other, no gaps."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slot:
    """Where one tensor lies in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass
class Bucket:
    slots: list[Slot]
    data: Tensor  # uint8 [bytes]; belongs to the packer and is overwritten by the next bucket but one

    def tensors(self) -> list[tuple[str, Tensor]]:
        return unpack(self.slots, self.data)


def unpack(slots: Iterable[Slot], data: Tensor) -> list[tuple[str, Tensor]]:
    """Views into ``data`` (copies where a slot is not aligned for its type)."""
    result, start = [], 0
    for slot in slots:
        dtype = getattr(torch, slot.dtype)
        part = data[start : start + slot.num_bytes]
        start += slot.num_bytes
        if part.storage_offset() % dtype.itemsize:
            part = part.clone()
        result.append((slot.name, part.view(dtype).view(slot.shape)))
    return result


class Packer:
    """Fills two reusable buffers by turns: one can be read while the other is filled.

    A buffer grows if a single tensor is larger than it.
    """

    def __init__(self, capacity: int, device: torch.device, *, shared: bool):
        """
        Args:
            capacity: bytes of both buffers together.
            shared: put CPU buffers into shared memory, so that another process can map them.
        """
        self.device, self.shared = device, shared
        self.capacity = capacity // 2
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]

    def pack(self, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[Bucket]:
        """Buckets of ``weights`` cast to ``dtype``; each is valid until the next but one is requested."""
        slots: list[Slot] = []
        used = 0
        for name, tensor in weights:
            size = tensor.numel() * dtype.itemsize
            if slots and used + size > self.capacity:
                yield self._filled(slots, used)
                slots, used = [], 0
            self._reserve(used + size)
            self._buffers[0][used : used + size].view(dtype).copy_(tensor.detach().reshape(-1))
            slots.append(Slot(name, str(dtype).removeprefix("torch."), tuple(tensor.shape), size))
            used += size
        if slots:
            yield self._filled(slots, used)

    def _filled(self, slots: list[Slot], used: int) -> Bucket:
        """The first buffer's content; the other one is filled next."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # another process may read it from here on
        bucket = Bucket(slots, self._buffers[0][:used])
        self._buffers.reverse()
        return bucket

    def _reserve(self, size: int) -> None:
        """Only an empty bucket can need more: whatever does not fit beside other tensors starts the next one."""
        if size <= self._buffers[0].numel():
            return
        grown = torch.empty(max(size, self.capacity), dtype=torch.uint8, device=self.device)
        if self.shared and self.device.type == "cpu":
            grown.share_memory_()
        self._buffers[0] = grown
