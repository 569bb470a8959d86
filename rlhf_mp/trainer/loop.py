"""What every training loop does besides training: it resumes, validates, saves and stops when it is asked to."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch

from rlhf_mp.data.types import LossFn, MiniBatch, Sums, TokenBatch
from rlhf_mp.observe.memory import peak_memory
from rlhf_mp.observe.metrics import MetricLog
from rlhf_mp.observe.reduce import added
from rlhf_mp.phase import Phase
from rlhf_mp.train.base import Scorer, TrainEngine
from rlhf_mp.trainer.best import Best
from rlhf_mp.trainer.updates import Updates


class Checkpoints(Protocol):
    def save(self, trainer: "Loop") -> None: ...
    def settle(self, *, wait: bool) -> None: ...
    def load_newest(self, trainer: "Loop") -> None: ...
    def write(self, trainer: "Loop", folder: Path) -> None: ...
    def read(self, trainer: "Loop", folder: Path) -> None: ...


@dataclass(frozen=True)
class Schedule:
    """When the run does what."""

    num_steps: int
    test_freq: int  # -1: only at the end
    save_freq: int  # -1: only at the end
    val_before_train: bool
    critic_warmup: int = 0  # first steps that train the critic alone

    def due(self, frequency: int, step: int) -> bool:
        return step == self.num_steps or (frequency > 0 and step % frequency == 0)


@dataclass(kw_only=True)
class Loop(ABC):
    """Runs on every launched rank (SPMD)."""

    schedule: Schedule
    checkpoints: Checkpoints
    log: MetricLog
    watch: Callable[[Phase], AbstractContextManager[None]]  # a phase that hangs is reported
    bounded: Callable[[str], AbstractContextManager[None]] = nullcontext  # so is anything else
    span: Callable[[str], AbstractContextManager[None]] = nullcontext  # a name in the timeline
    memory: Callable[[], Mapping[str, float]] = peak_memory
    packed: bool = False  # engines leave out the padding of micro-batches
    counts: bool = True  # False where another rank holds the same data, as a part of the same model
    stop_requested: Callable[[], bool] = lambda: False  # collective; asked once a step
    best: Best | None = None  # None: no validation is better than another
    updates: Updates = field(default_factory=Updates)
    step: int = 0

    @property
    @abstractmethod
    def trained(self) -> dict[str, TrainEngine]:
        """The models that checkpoints hold."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What decides the next step beside the models."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    @abstractmethod
    def train_step(self) -> None: ...

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Validate; the metrics, or nothing without validation data."""

    @abstractmethod
    def publish(self) -> None:
        """Hand the weights on, before the first step and after each."""

    def resume(self) -> None:
        """Continue where the newest checkpoint stands, if there is one."""
        self.checkpoints.load_newest(self)

    @property
    def finished(self) -> bool:
        """After the last step, or a validation that is good enough."""
        return self.step >= self.schedule.num_steps or (self.best is not None and self.best.good_enough)

    def train(self) -> None:
        """Train to the end, or save and return after a step in which a stop was requested."""
        self.publish()
        self.log.start()
        if self.step == 0 and self.schedule.val_before_train:
            self.improves(self._validated())
        while not self.finished:
            with self.span(f"step {self.step + 1}"):
                self.train_step()
                self.end_step()
            if not self.finished and self.stop_requested():
                self.save(wait=True)
                return
            metrics = self._validated() if self.schedule.due(self.schedule.test_freq, self.step) else {}
            due = self.improves(metrics) or self.schedule.due(self.schedule.save_freq, self.step)
            began = perf_counter()
            if due:
                self.save(wait=self.finished)
            else:
                self.checkpoints.settle(wait=False)
            self.log.start()
            if due:  # the step that follows is the one that was held up
                self.log.add({"checkpoint/blocking_s": (perf_counter() - began, 1)})

    def end_step(self) -> dict[str, float]:
        """Hand the weights on and log the step. Returns its metrics.

        Raises:
            DivergedError: too many updates in a row were skipped.
        """
        self.step += 1
        self.publish()
        metrics = self.log.finish(self.step)
        if self.updates.hopeless:  # on all ranks alike: a gradient's norm is one for all
            self.save(wait=True)
            self.updates.give_up(self.step)
        return metrics

    def _validated(self) -> dict[str, float]:
        with self.span("validation"):
            return self.evaluate()

    def save(self, *, wait: bool) -> None:
        """Collective. A checkpoint of this moment; where it is written in the background, whole only after ``wait``."""
        with self.span("checkpoint"), self.bounded("a checkpoint"):
            self.checkpoints.save(self)
            if wait:
                self.checkpoints.settle(wait=True)

    def update(self, name: str, batch: TokenBatch, minibatches: list[MiniBatch], loss_fn: LossFn, prefix: str) -> Sums:
        """One optimizer step of a trained model for each mini-batch. Returns the engine's metrics."""
        found: list[Sums] = []
        for minibatch in minibatches:
            micro_batches = [batch.select(rows) for rows in minibatch.micro_batches]
            metrics = self.trained[name].train_step(micro_batches, minibatch.totals, loss_fn)
            found.append(metrics)
            self.log.add(metrics, prefix)
            self.count(padding(micro_batches, packed=self.packed))
        norms = [metrics["grad_norm"][0] for metrics in found]
        self.log.add(self.updates.made(name, minibatches, norms), prefix)
        return added(found)

    def count(self, sums: Sums, prefix: str = "") -> None:
        """Add what follows from this rank's share, unless another rank does."""
        if self.counts:
            self.log.add(sums, prefix)

    def improves(self, metrics: dict[str, float]) -> bool:
        """Whether a validation is the best so far, by the metric that decides it."""
        return self.best is not None and bool(metrics) and self.best.offer(self.step, metrics)

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        with self.watch(phase), self.log.time(phase):
            yield


def scored(model: Scorer, batch: TokenBatch, cut: list[list[int]]) -> torch.Tensor:
    """Log-probs or values of all rows, computed micro-batch by micro-batch."""
    result = torch.zeros_like(batch.rollout_logprobs)
    for rows, scores in zip(cut, model.score([batch.select(rows) for rows in cut]), strict=True):
        if rows:  # an empty micro-batch only keeps the ranks in step
            result[rows, : scores.shape[1]] = scores
    return result


def padding(micro_batches: list[TokenBatch], *, packed: bool) -> Sums:
    """Tokens trained on, and the share of computed positions that were padding."""
    real = sum(float(b.lengths.sum()) for b in micro_batches if b.mask.any())
    computed = sum(positions(b, packed=packed) for b in micro_batches)
    return {"train/tokens": (real, 1), "train/padding_fraction": (computed - real, computed)}


def positions(batch: TokenBatch, *, packed: bool) -> int:
    """Tokens that go through the model."""
    rows, width = batch.tokens.shape
    return int(batch.lengths.clamp(max=width).sum()) if packed else rows * width
