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
    data: Tensor  # uint8 [bytes]; belongs to the packer and is overwritten by the next bucket

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
    """Fills one reusable buffer. It grows once if a single tensor is larger than ``capacity``."""

    def __init__(self, capacity: int, device: torch.device, *, shared: bool):
        """
        Args:
            capacity: bytes.
            shared: put CPU buffers into shared memory, so that another process can map them.
        """
        self.device, self.shared = device, shared
        self.capacity = capacity
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def pack(self, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[Bucket]:
        """Buckets of ``weights`` cast to ``dtype``; each is valid until the next is requested."""
        slots: list[Slot] = []
        used = 0
        for name, tensor in weights:
            size = tensor.numel() * dtype.itemsize
            if slots and used + size > self.capacity:
                yield Bucket(slots, self._buffer[:used])
                slots, used = [], 0
            self._reserve(used + size)
            self._buffer[used : used + size].view(dtype).copy_(tensor.detach().reshape(-1))
            slots.append(Slot(name, str(dtype).removeprefix("torch."), tuple(tensor.shape), size))
            used += size
        if slots:
            yield Bucket(slots, self._buffer[:used])

    def _reserve(self, size: int) -> None:
        """Only an empty bucket can need more: whatever does not fit beside other tensors starts the next one."""
        if size <= self._buffer.numel():
            return
        grown = torch.empty(max(size, self.capacity), dtype=torch.uint8, device=self.device)
        if self.shared and self.device.type == "cpu":
            grown.share_memory_()
        self._buffer = grown
