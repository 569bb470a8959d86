"""What one training step was made of, on disk: enough to make its updates again.

One safetensors file per data-parallel rank, so that reading runs no code; what is no tensor is in its header as JSON.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rlhf_mp.data.types import MiniBatch, TokenBatch, Totals
from rlhf_mp.errors import CheckpointError

HEADER = "step"
CONFIG = "config.yaml"


@dataclass(frozen=True)
class StepBatch:
    """One data-parallel rank's part of a step."""

    step: int  # how many are done after it; its weights are of version step - 1
    dp_rank: int
    dp_size: int
    batch: TokenBatch  # scored and with advantages
    updates: dict[str, list[MiniBatch]]  # of each model, in the order they were made
    skipped: dict[str, list[int]]  # of each model, which of its updates changed nothing
    num_steps: int = 0  # of the whole run: what learning rates follow
    versions: list[int] = field(default_factory=list)  # of the weights that sampled each row; empty: nothing sampled

    @property
    def changed_nothing(self) -> bool:
        return all(len(self.skipped[name]) == len(made) for name, made in self.updates.items())


def folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / "batches" / f"step_{step:06d}"


def kept_steps(run_dir: Path) -> list[int]:
    """Steps whose batch lies in a run directory, in order."""
    return sorted(int(folder.name.removeprefix("step_")) for folder in (run_dir / "batches").glob("step_*"))


def write(folder: Path, part: StepBatch) -> None:
    """The file of one rank, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    header = {name: getattr(part, name) for name in ("step", "dp_rank", "dp_size", "skipped", "num_steps", "versions")}
    header["updates"] = {name: [asdict(minibatch) for minibatch in made] for name, made in part.updates.items()}
    tensors = {f.name: getattr(part.batch, f.name) for f in fields(part.batch)}
    file = folder / f"rank_{part.dp_rank}.safetensors"
    unfinished = file.with_suffix(".writing")
    save_file(
        {name: x.detach().cpu().contiguous() for name, x in tensors.items() if x is not None},
        unfinished,
        metadata={HEADER: json.dumps(header)},
    )
    os.replace(unfinished, file)


def read(folder: Path) -> list[StepBatch]:
    """All ranks' parts, in their order.

    Raises:
        CheckpointError: there is none, one is missing or cannot be read.
    """
    parts = sorted((_read_file(file) for file in folder.glob("rank_*.safetensors")), key=lambda part: part.dp_rank)
    if not parts or len(parts) != parts[0].dp_size:
        raise CheckpointError(f"{folder} has the batches of {len(parts)} of {parts[0].dp_size if parts else '?'} ranks")
    return parts


def _read_file(file: Path) -> StepBatch:
    try:
        with safe_open(file, "pt") as stored:
            header, names = json.loads(stored.metadata()[HEADER]), stored.keys()
            batch = TokenBatch(**{name: stored.get_tensor(name) for name in names})
    except (SafetensorError, OSError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} is no batch of a step: {type(error).__name__}: {error}") from error
    header["updates"] = {
        name: [MiniBatch(made["micro_batches"], Totals(**made["totals"])) for made in minibatches]
        for name, minibatches in header["updates"].items()
    }
    return StepBatch(batch=batch, **header)


def spread(parts: Sequence[StepBatch], dp_rank: int, dp_size: int) -> StepBatch:
    """The part of one rank of ``dp_size`` in the same step.

    At the saved number of ranks it is what the rank had. At another one every saved part goes to one rank, which has
    all its micro-batches; ranks fill up with empty ones, as every rank needs equally many.
    """
    if dp_size == len(parts):
        return parts[dp_rank]
    shares = [[*parts[rank::dp_size]] for rank in range(dp_size)]
    own = shares[dp_rank] or [parts[0]]
    offsets = [sum(len(part.batch.tokens) for part in own[:i]) for i in range(len(own))]

    def minibatch(name: str, index: int) -> MiniBatch:
        cut = [
            [row + offset for row in rows]
            for part, offset in zip(shares[dp_rank], offsets, strict=False)
            for rows in part.updates[name][index].micro_batches
        ]
        most = max(sum(len(part.updates[name][index].micro_batches) for part in share) for share in shares)
        return MiniBatch(cut + [[]] * (most - len(cut)), parts[0].updates[name][index].totals)

    updates = {name: [minibatch(name, i) for i in range(len(made))] for name, made in parts[0].updates.items()}
    batch, versions = joined([part.batch for part in own]), [version for part in own for version in part.versions]
    return replace(parts[0], dp_rank=dp_rank, dp_size=dp_size, batch=batch, updates=updates, versions=versions)


def joined(batches: Sequence[TokenBatch]) -> TokenBatch:
    """All rows of several batches, padded to the longest."""
    width = max(batch.tokens.shape[1] for batch in batches)

    def join(name: str) -> torch.Tensor | None:
        tensors = [getattr(batch, name) for batch in batches]
        if all(tensor is None for tensor in tensors):
            return None
        if name == "paid":  # a rank has none whose episodes all had one turn
            tensors = [torch.zeros_like(b.mask) if b.paid is None else b.paid for b in batches]
        if tensors[0].dim() == 1:
            return torch.cat(tensors)
        return torch.cat([torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in tensors])

    return TokenBatch(**{f.name: join(f.name) for f in fields(TokenBatch)})
