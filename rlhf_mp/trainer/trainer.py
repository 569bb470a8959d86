"""The RL loop. Runs on every launched rank (SPMD); each line means the same thing on all of them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from rlhf_mp.algorithms.base import Algorithm
from rlhf_mp.algorithms.normalize import SumOverRanks, only_rank
from rlhf_mp.algorithms.value_loss import value_metrics
from rlhf_mp.data.collate import collate, with_estimates
from rlhf_mp.data.types import LossFn, MiniBatch, SampleText, Share, Sums, TokenBatch
from rlhf_mp.phase import Phase
from rlhf_mp.train.base import Scorer, TrainEngine
from rlhf_mp.trainer.loop import Loop, padding, scored
from rlhf_mp.trainer.reward_model import RewardModel


class Rollouts(Protocol):
    """The scheduler, as a rank sees it."""

    def fetch(self, step: int) -> Share: ...
    def publish(self, version: int) -> None: ...
    def evaluate(self) -> tuple[Sums, list[SampleText]]: ...
    def state_dict(self, step: int) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Swap(Protocol):
    """Trainer weights into the engines, verified."""

    def push(self, actor: TrainEngine, version: int, *, must_differ: bool) -> Sums: ...


@dataclass(kw_only=True)
class Trainer(Loop):
    """Weight version v is what step v samples from; after ``step`` steps the version is ``step``."""

    actor: TrainEngine
    reference: Scorer | None
    algorithm: Algorithm
    rollouts: Rollouts
    swap: Swap
    has_validation: bool
    critic: TrainEngine | None = None
    reward_model: RewardModel | None = None
    sum_over_ranks: SumOverRanks = only_rank
    last_grad_norm: float = field(default=0.0, init=False)

    @property
    def trained(self) -> dict[str, TrainEngine]:
        """The models that checkpoints hold."""
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic is not None else {})

    def save_checkpoint(self, path: str | Path) -> None:
        """Collective, after a step. Everything that the next one depends on, in a folder that this run never removes.

        Raises:
            CheckpointError: it could not be written.
        """
        self.checkpoints.write(self, Path(path))

    def load_checkpoint(self, path: str | Path) -> None:
        """Collective, before ``train``. Continue from such a folder, or from one of a run's own checkpoints.

        Raises:
            CheckpointError: it is damaged, or of another model, backend or number of ranks.
        """
        self.checkpoints.read(self, Path(path))

    def state_dict(self) -> dict[str, Any]:
        """What decides the next step beside the models: the place in the data, and what has been seen of it."""
        state = {"data": self.rollouts.state_dict(self.step), "algorithm": self.algorithm.state_dict()}
        return state if self.reward_model is None else state | {"reward_model": self.reward_model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rollouts.load_state_dict(state["data"])
        self.algorithm.load_state_dict(state["algorithm"])
        if self.reward_model is not None and "reward_model" in state:  # it may have come only now
            self.reward_model.load_state_dict(state["reward_model"])

    def train_step(self) -> None:
        with self.phase(Phase.rollout):
            share = self.rollouts.fetch(self.step)  # waits; raises on every rank if an engine died
        self.count(share.metrics)
        batch = collate(share.trajectories)
        with self.phase(Phase.score):
            self.score(batch, share)
            self.count(self.algorithm.estimate(batch, self.sum_over_ranks))
        self.log.samples(self.step + 1, [with_estimates(sample, batch) for sample in share.samples])
        with self.phase(Phase.train):
            if self.critic is not None:
                self.count(value_metrics(batch, self.sum_over_ranks), "critic/")
                self.update(self.critic, batch, share.critic.minibatches, self.algorithm.value_loss, "critic/")
            if self.step >= self.schedule.critic_warmup:
                self.last_grad_norm = self.update(
                    self.actor, batch, share.minibatches, self.algorithm.policy_loss, "actor/"
                )
        self.log.add({name: (value, 1) for name, value in self.memory().items()})

    def score(self, batch: TokenBatch, share: Share) -> None:
        """Fill in what the algorithm declares it needs and, with a reward model, its rewards; nothing else."""
        if self.algorithm.needs_old_logprobs:
            batch.old_logprobs = self.scored(self.actor, batch, share.score_rows)
        if self.reference is not None:
            batch.ref_logprobs = self.scored(self.reference, batch, share.score_rows)
        if self.critic is not None:
            batch.values = self.scored(self.critic, batch, share.critic.score_rows)
        if self.reward_model is not None:
            batch.rewards, metrics = self.reward_model.rewards(batch, share.score_rows)
            self.count(metrics, "reward_model/")

    def scored(self, model: Scorer, batch: TokenBatch, cut: list[list[int]]) -> torch.Tensor:
        self.count({"score/tokens": (float(batch.lengths.sum()), 1)})
        return scored(model, batch, cut)

    def update(
        self, model: TrainEngine, batch: TokenBatch, minibatches: list[MiniBatch], loss_fn: LossFn, prefix: str
    ) -> float:
        """One optimizer step for each mini-batch. Returns the last gradient's norm."""
        norm = 0.0
        for minibatch in minibatches:
            micro_batches = [batch.select(rows) for rows in minibatch.micro_batches]
            metrics = model.train_step(micro_batches, minibatch.totals, loss_fn)
            norm = metrics["grad_norm"][0]
            self.log.add(metrics, prefix)
            self.count(padding(micro_batches, packed=self.packed))
        return norm

    def count(self, sums: Sums, prefix: str = "") -> None:
        """Add what follows from this rank's share, unless another rank does."""
        if self.counts:
            self.log.add(sums, prefix)

    def publish(self) -> None:
        """Make the engines sample from the current weights, and tell the scheduler they do."""
        with self.phase(Phase.sync):
            self.log.add(self.swap.push(self.actor, self.step, must_differ=self.last_grad_norm > 0))
            self.rollouts.publish(self.step)

    def evaluate(self) -> dict[str, float]:
        """Held-out accuracy under the live weights; written apart from a step. Empty without validation data."""
        if not self.has_validation:
            return {}
        self.log.start()
        with self.watch(Phase.rollout):
            metrics, samples = self.rollouts.evaluate()
        self.log.add(metrics, "eval/")
        self.log.samples(self.step, samples)
        return self.log.finish(self.step, "eval")
