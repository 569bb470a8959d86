"""The loop of the tasks that learn from examples: fine-tuning, preference optimisation, reward models.

Runs on every launched rank (SPMD), like the RL loop, with the same engines, checkpoints and metrics.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from rlhf_mp.algorithms.supervised import Task
from rlhf_mp.data.collate import collate
from rlhf_mp.data.types import Share, TokenBatch
from rlhf_mp.phase import Phase
from rlhf_mp.train.base import Scorer, TrainEngine
from rlhf_mp.trainer.loop import Loop, scored


class Batches(Protocol):
    """This rank's share of one batch after the other."""

    def fetch(self) -> Share: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(kw_only=True)
class SupervisedTrainer(Loop):
    """One optimizer step per batch."""

    task: Task
    actor: TrainEngine  # the model that is trained, whatever its head
    reference: Scorer | None
    batches: Batches
    validation: Share | None
    _held_out: TokenBatch | None = field(default=None, init=False)

    @property
    def trained(self) -> dict[str, TrainEngine]:
        """The models that checkpoints hold."""
        return {"actor": self.actor}

    def state_dict(self) -> dict[str, Any]:
        """What decides the next step beside the model: the place in the data."""
        return {"data": self.batches.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches.load_state_dict(state["data"])

    def publish(self) -> None:
        """Nobody samples from this model."""

    def train_step(self) -> None:
        share = self.batches.fetch()
        batch = collate(share.trajectories)
        self.score(batch, share.score_rows)
        with self.phase(Phase.train):
            self.update("actor", batch, share.minibatches, self.task.loss, "train/")
            self.updates.settle(self.step + 1, self.schedule.num_steps, batch)
        self.count(share.metrics)
        self.log.add({name: (value, 1) for name, value in self.memory().items()})

    def score(self, batch: TokenBatch, cut: list[list[int]]) -> None:
        """Fill in what the task's loss needs of the reference model."""
        if self.reference is not None:
            with self.phase(Phase.score):
                batch.ref_logprobs = scored(self.reference, batch, cut)

    def evaluate(self) -> dict[str, float]:
        """The loss and its metrics on held-out examples; written apart from a step. Empty without any."""
        if self.validation is None:
            return {}
        self.log.start()
        cut, (minibatch,) = self.validation.score_rows, self.validation.minibatches
        if self._held_out is None:
            self._held_out = collate(self.validation.trajectories)
            self.score(self._held_out, cut)  # the reference is frozen: once is enough
        with self.watch(Phase.score), torch.no_grad():
            micro_batches = [self._held_out.select(rows) for rows in cut]
            for batch, scores in zip(micro_batches, self.actor.score(micro_batches), strict=True):
                _, metrics = self.task.loss(self.task.output(scores), batch, minibatch.totals)
                if self.counts:
                    self.log.add({name: (float(total), float(n)) for name, (total, n) in metrics.items()}, "eval/")
        return self.log.finish(self.step, "eval")
