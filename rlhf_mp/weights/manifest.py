"""What a version of the weights consists of, and how both sides agree that it arrived."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache

import torch
from torch import Tensor

COLUMNS = 1024
ROWS = {"cpu": 128, "cuda": 1 << 17}
"""Summed at once: 1 MiB, read twice, stays in a core's cache; a GPU wants fewer calls."""


@cache
def _odd_numbers(device: torch.device) -> Tensor:
    """The factors of a row; made for every tensor, they would take longer than the sum."""
    return torch.arange(1, 2 * COLUMNS + 1, 2, device=device)


def checksum(tensor: Tensor) -> int:
    """A 64-bit sum of the tensor's bytes, weighted by position; computed where the tensor lives.

    Words w_i of 8 bytes give sum of w_i * (2i + 1) mod 2^64. An odd factor is invertible, so any change of one word
    changes the sum; integer sums do not depend on the order of addition, so CPU and GPU agree. For word c of row r,
    2i + 1 = 2 * COLUMNS * r + (2c + 1): sums of rows and of columns give it without a product for every word.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.numel() % 8 or data.storage_offset() % 8:
        data = torch.cat([data, data.new_zeros(-data.numel() % 8)])
    words = data.view(torch.int64)
    odd = _odd_numbers(words.device)
    whole = words.numel() // COLUMNS * COLUMNS
    rest = words[whole:]
    total = (rest * (odd[: rest.numel()] + 2 * whole)).sum()
    if whole:
        rows, columns = [], torch.zeros_like(odd)
        for part in words[:whole].view(-1, COLUMNS).split(ROWS[words.device.type]):
            rows.append(part.sum(1))
            columns += part.sum(0)
        starts = torch.arange(0, 2 * whole, 2 * COLUMNS, device=words.device)
        total += (columns * odd).sum() + (torch.cat(rows) * starts).sum()
    return int(total) & (2**64 - 1)


@dataclass(frozen=True)
class TensorRecord:
    """One tensor as it was sent or as it arrived."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    checksum: int

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "TensorRecord":
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), checksum(tensor))


@dataclass(frozen=True)
class Manifest:
    """Every tensor of one version."""

    version: int
    records: tuple[TensorRecord, ...]

    def to_json(self) -> str:
        return json.dumps({"version": self.version, "records": [asdict(r) for r in self.records]})

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        data = json.loads(text)
        records = [TensorRecord(r["name"], r["dtype"], tuple(r["shape"]), r["checksum"]) for r in data["records"]]
        return cls(data["version"], tuple(records))


def differences(manifest: Manifest, arrived: Iterable[TensorRecord], expected_names: Iterable[str]) -> list[str]:
    """What keeps an engine from serving this version; empty when everything arrived once and whole.

    Args:
        expected_names: tensors of the engine's own checkpoint, so that one the trainer forgot is noticed too.
    """
    found: list[str] = []
    seen: dict[str, TensorRecord] = {}
    for record in arrived:
        if record.name in seen:
            found.append(f"{record.name} arrived twice")
        seen[record.name] = record
    sent = {r.name: r for r in manifest.records}
    for name, record in sent.items():
        if name not in seen:
            found.append(f"{name} was sent but did not arrive")
        elif (got := seen[name]) != record:
            part = next(f for f in ("dtype", "shape", "checksum") if getattr(got, f) != getattr(record, f))
            found.append(f"{name}: {part} {getattr(got, part)} arrived, {getattr(record, part)} was sent")
    found += [f"{name} arrived but belongs to no tensor of this version" for name in seen if name not in sent]
    found += [f"{name} is in the engine's checkpoint but was not sent" for name in expected_names if name not in sent]
    return found
