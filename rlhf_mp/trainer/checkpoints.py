"""Saving and resuming a run: everything that decides the next step, in one folder, written by all ranks."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from rlhf_mp import checkpoint
from rlhf_mp.errors import CheckpointError
from rlhf_mp.trainer.background import Background
from rlhf_mp.trainer.loop import Loop

SEEDS_APART = 1_000_003
"""Ranks' own seeds are consecutive numbers: those of a step must not be another rank's of another step."""


class Ranks(Protocol):
    """What the ranks need of each other."""

    rank: int
    num_ranks: int

    def barrier(self) -> None: ...
    def broadcast(self, value: Any) -> Any: ...
    def gather(self, value: Any) -> list[Any]: ...


class RunCheckpoints:
    """Checkpoints of one run directory."""

    def __init__(
        self,
        run_dir: Path,
        ranks: Ranks,
        *,
        keep: int,
        resume_from: Path | None,
        resume: bool,
        identity: dict[str, Any],
        trained: dict[str, Any],
        export: Callable[[Path], None] | None,
        say: Callable[[str], None],
        in_background: bool = False,
    ):
        """
        Args:
            resume_from: this checkpoint and no other; None: the newest undamaged one of ``run_dir``, if any.
            identity: shapes of the model; a checkpoint of others is refused.
            trained: what else a checkpoint must have been written with, see ``checkpoint.misfits``.
            export: collective; writes a Hugging Face checkpoint beside the engine's. None: not wanted.
            in_background: training goes on while a checkpoint is written.
        """
        self.run_dir, self.ranks, self.keep = run_dir, ranks, keep
        self.resume_from, self.resume, self.identity = resume_from, resume, identity
        self.trained, self.export, self.say = trained, export, say
        self.in_background = in_background
        self._in_flight: tuple[Background, int, int | None] | None = None  # with its step, and that of the best then

    def save(self, trainer: Loop) -> None:
        """Collective. Older checkpoints go only after the new one is whole.

        Raises:
            CheckpointError: it could not be written.
        """
        folder = checkpoint.folder_of(self.run_dir, trainer.step)
        if self.in_background:
            self.settle(wait=True)  # one at a time: it has copies of everything in host memory
            self._in_flight = self._started(trainer, folder), trainer.step, best_step(trainer)
            return
        self.write(trainer, folder)
        self._retire(trainer.step, best_step(trainer))
        self.ranks.barrier()

    def settle(self, *, wait: bool) -> None:
        """Collective, between steps: see what became of a checkpoint that is being written.

        Args:
            wait: until it is whole.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._in_flight is None:
            return
        background, *of_then = self._in_flight
        if background.landed(wait=wait):
            self._in_flight = None
            self._retire(*of_then)

    def _retire(self, step: int, best: int | None) -> None:
        """Older checkpoints, and those of later steps of an attempt before."""
        if self.ranks.rank != 0:
            return
        for place in checkpoint.set_aside_later(self.run_dir, step):
            self.say(f"set aside as {place}: this run did not continue from it")
        checkpoint.remove_old(self.run_dir, self.keep, spare=best)

    def _started(self, trainer: Loop, folder: Path) -> Background:
        """Everything of this moment copied, and on its way to ``folder``."""
        if self.ranks.rank == 0:
            checkpoint.start(folder)
        self.ranks.barrier()
        place = checkpoint.unfinished(folder)
        with whole_or_removed(place):
            writings = [engine.snapshot(place / name) for name, engine in trainer.trained.items()]
            if self.export is not None:
                self.export(place / "huggingface")
        random, state = torch.get_rng_state(), json.dumps(self._state(trainer))

        def write() -> None:
            with whole_or_removed(place):
                for writing in writings:
                    writing.write()
                torch.save(random, place / f"rng_{self.ranks.rank}.pt")

        def seal() -> None:
            checkpoint.finish(folder, json.loads(state))
            self.say(f"checkpoint {folder}")

        return Background(self.ranks, writings, write, seal)

    def write(self, trainer: Loop, folder: Path) -> None:
        """Collective. One checkpoint, anywhere; what was at ``folder`` goes when the new one is whole.

        Raises:
            CheckpointError: it could not be written.
        """
        self.settle(wait=True)  # a place to write to is emptied of whatever was being written beside it
        if self.ranks.rank == 0:
            checkpoint.start(folder)
        self.ranks.barrier()
        place = checkpoint.unfinished(folder)
        with whole_or_removed(place):
            for name, engine in trainer.trained.items():
                engine.save(place / name)
            torch.save(torch.get_rng_state(), place / f"rng_{self.ranks.rank}.pt")
            if self.export is not None:
                self.export(place / "huggingface")
            self.ranks.barrier()
            if self.ranks.rank == 0:
                checkpoint.finish(folder, self._state(trainer))
                self.say(f"checkpoint {folder}")
        self.ranks.barrier()

    def _state(self, trainer: Loop) -> dict[str, Any]:
        return {
            "step": trainer.step,  # the weight version is the same number
            "model": self.identity,
            "trained": self.trained,
            "num_ranks": self.ranks.num_ranks,
            "best": trainer.best.state_dict() if trainer.best else None,
            **trainer.state_dict(),
        }

    def load_newest(self, trainer: Loop) -> None:
        """Collective. Continue from a checkpoint, or leave the trainer at step 0.

        Raises:
            CheckpointError: the only ones there are damaged, or of another model or number of ranks.
        """
        found = self.ranks.broadcast(self._choose() if self.ranks.rank == 0 else None)
        if found is not None:
            self._load(trainer, *found)

    def read(self, trainer: Loop, folder: Path) -> None:
        """Collective. Continue from one checkpoint, anywhere.

        Raises:
            CheckpointError: it is damaged, or of another model or number of ranks.
        """
        state = checkpoint.read_state(folder, checksums=self.ranks.rank == 0)  # every byte is read by one rank
        self._require_fit(folder, state)
        self._load(trainer, folder, state)

    def _require_fit(self, folder: Path, state: dict[str, Any]) -> None:
        if reasons := list(checkpoint.misfits(state, self.identity, self.ranks.num_ranks, self.trained)):
            raise CheckpointError(f"{folder} {'; '.join(reasons)}\n    fix: trainer.experiment_name=<new name>")

    def _load(self, trainer: Loop, folder: Path, state: dict[str, Any]) -> None:
        for name, engine in trainer.trained.items():
            engine.load(folder / name)
        if state["num_ranks"] == self.ranks.num_ranks:
            torch.set_rng_state(torch.load(folder / f"rng_{self.ranks.rank}.pt", weights_only=True))
        else:  # of another number of ranks: each goes on from a seed of its own, which no step before had
            torch.manual_seed(torch.initial_seed() + self.ranks.rank + SEEDS_APART * state["step"])
            self.say(f"written by {state['num_ranks']} rank(s), resumed by {self.ranks.num_ranks}")
        trainer.load_state_dict(state)
        if trainer.best is not None:
            trainer.best.load_state_dict(state["best"])
        trainer.step = state["step"]
        self.say(f"resumed from {folder} at step {trainer.step}")

    def _choose(self) -> tuple[Path, dict[str, Any]] | None:
        if not self.resume:
            return None
        candidates = [self.resume_from] if self.resume_from else checkpoint.newest_first(self.run_dir)
        damaged: list[str] = []
        for folder in candidates:
            try:
                state = checkpoint.read_state(folder, checksums=True)
            except CheckpointError as error:
                damaged.append(str(error))
                self.say(f"damaged checkpoint {folder.name} is not used: {error}")
                continue
            self._require_fit(folder, state)
            return folder, state
        if damaged:
            fix = "trainer.resume_mode=disable starts from the beginning"
            raise CheckpointError(f"no undamaged checkpoint: {'; '.join(damaged)}\n    fix: {fix}")
        return None


def best_step(trainer: Loop) -> int | None:
    return trainer.best.step if trainer.best else None


@contextmanager
def whole_or_removed(place: Path) -> Iterator[None]:
    """Where writing fails, make room again, for the logs above all, and say which file it was.

    torch.save reports a full disk as a RuntimeError that names neither file nor reason.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):
            raise
        last = max((f for f in place.rglob("*") if f.is_file()), key=lambda f: f.stat().st_mtime_ns, default=place)
        free = shutil.disk_usage(place).free
        shutil.rmtree(place, ignore_errors=True)
        raise CheckpointError(
            f"{last} could not be written, with {free / 1e6:.1f} MB free: {error}\n"
            "    fix: make room, or trainer.default_local_dir=<folder on another disk>; older checkpoints are whole"
        ) from error
