"""Optimizer steps that change nothing, because their loss or gradient is no finite number: counted, kept, limited."""

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from rlhf_mp import checkpoint
from rlhf_mp.data import step_batch
from rlhf_mp.data.step_batch import StepBatch
from rlhf_mp.data.types import MiniBatch, Sums, TokenBatch
from rlhf_mp.errors import DivergedError
from rlhf_mp.train.base import ParallelLayout

NUM_BAD_KEPT = 8
"""Steps with a skipped update whose batches stay, the newest: a run that goes wrong often must not fill its disk."""


class Keeper(Protocol):
    """Writes the batches of steps. Every method is collective."""

    layout: ParallelLayout

    def keep(self, part: StepBatch) -> Path | None: ...


class KeptBatches:
    """The batches of a run directory."""

    def __init__(
        self,
        run_dir: Path,
        barrier: Callable[[], None],
        layout: ParallelLayout,
        which: Literal["bad", "all", "off"],
        config: str | None,
    ):
        """
        Args:
            which: bad: of steps with a skipped update; all: of every step since the oldest checkpoint, too.
            config: the run's, as YAML, to lie beside each batch; None where another rank writes it.
        """
        self.run_dir, self.barrier, self.layout, self.which, self.config = run_dir, barrier, layout, which, config
        self._bad = step_batch.kept_steps(run_dir) if which == "bad" else []

    def keep(self, part: StepBatch) -> Path | None:
        """Collective. Where the batch lies now, if it is one to be kept."""
        bad = any(part.skipped.values())
        if self.which == "off" or (self.which == "bad" and not bad):
            return None
        folder = step_batch.folder_of(self.run_dir, part.step)
        if bad:
            self._bad.append(part.step)
        if self.config is not None:
            shutil.rmtree(folder, ignore_errors=True)  # of an attempt before, maybe by more ranks
            folder.mkdir(parents=True)
            (folder / step_batch.CONFIG).write_text(self.config)
            self._remove_old(part.step)
        self.barrier()
        if self.layout.is_output_rank:
            step_batch.write(folder, part)
        self.barrier()  # a rank that ends now ends the others
        return folder

    def _remove_old(self, step: int) -> None:
        saved = [checkpoint.step_of(folder) for folder in checkpoint.newest_first(self.run_dir)]
        wanted = {*self._bad[-NUM_BAD_KEPT:], step}
        if self.which == "all":  # from the oldest checkpoint on any of them can be made again
            oldest = min((s for s in saved if s < step), default=0)
            wanted |= {*range(oldest + 1, step)}
        own = {*self._bad} | ({*step_batch.kept_steps(self.run_dir)} if self.which == "all" else set())
        for gone in own - wanted:
            shutil.rmtree(step_batch.folder_of(self.run_dir, gone), ignore_errors=True)


@dataclass
class Updates:
    """What became of a step's updates."""

    limit: int = 3  # so many skipped in a row end the run
    keeper: Keeper | None = None
    say: Callable[[str], None] = print
    moved: bool = field(default=False, init=False)  # whether the last updates changed their model
    _in_a_row: dict[str, int] = field(default_factory=dict, init=False)
    _made: dict[str, list[MiniBatch]] = field(default_factory=dict, init=False)
    _skipped: dict[str, list[int]] = field(default_factory=dict, init=False)
    _last: Path | None = field(default=None, init=False)

    def made(self, model: str, minibatches: Sequence[MiniBatch], norms: Sequence[float]) -> Sums:
        """Of one model in this step: with the norm of each gradient, which is no finite number where it was skipped."""
        self._made[model] = [*minibatches]
        self.moved = any(math.isfinite(norm) and norm > 0 for norm in norms)
        self._skipped[model] = [i for i, norm in enumerate(norms) if not math.isfinite(norm)]
        for norm in norms:
            self._in_a_row[model] = 0 if math.isfinite(norm) else self._in_a_row.get(model, 0) + 1
        return {"skipped_updates": (float(len(self._skipped[model])), 1.0)}

    def settle(self, step: int, num_steps: int, batch: TokenBatch, versions: Sequence[int] = ()) -> None:
        """Collective, once all updates of ``step`` are made: keep what they were made of, and tell what was skipped.

        Args:
            versions: of the weights that sampled each row.
        """
        made, skipped, self._made, self._skipped = self._made, self._skipped, {}, {}
        place = None
        if self.keeper is not None:
            layout = self.keeper.layout
            place = self.keeper.keep(
                StepBatch(step, layout.dp_rank, layout.dp_size, batch, made, skipped, num_steps, [*versions])
            )
        for model, which in skipped.items():
            if which:
                self._last = place
                self.say(
                    f"step {step}: {len(which)} of {len(made[model])} updates of the {model} skipped: their loss or "
                    f"gradient is no finite number" + (f"; the batch is in {place}" if place else "")
                )

    @property
    def hopeless(self) -> bool:
        """Whether so many were skipped in a row that the run should end."""
        return max(self._in_a_row.values(), default=0) >= self.limit

    def give_up(self, step: int) -> None:
        """
        Raises:
            DivergedError: always; it says which model and how to look into it.
        """
        model = max(self._in_a_row, key=self._in_a_row.__getitem__)
        look = "trainer.save_batches=bad keeps the batch to look into"
        if self._last:
            look = f"python launch/replay.py {self._last.parents[1]} --step {step} shows where it arises"
        raise DivergedError(
            f"{self._in_a_row[model]} updates of the {model} in a row skipped, the last in step {step}: their loss or "
            "gradient is no finite number; weights and optimizer are those before the first of them\n"
            f"    fix: {look}; trainer.max_skipped_updates={2 * self.limit} goes on longer"
        )
