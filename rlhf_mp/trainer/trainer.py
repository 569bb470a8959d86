"""The RL loop. Runs on every launched rank (SPMD); each line means the same thing on all of them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from rlhf_mp.algorithms.base import Algorithm
from rlhf_mp.algorithms.normalize import SumOverRanks, only_rank
from rlhf_mp.algorithms.value_loss import value_metrics
from rlhf_mp.data.collate import collate, with_estimates
from rlhf_mp.data.prompts import Row
from rlhf_mp.data.types import LossFn, SampleText, Share, Sums, TokenBatch
from rlhf_mp.phase import Phase
from rlhf_mp.train.base import Scorer, TrainEngine
from rlhf_mp.trainer.loop import Loop, scored
from rlhf_mp.trainer.reward_model import RewardModel

T = TypeVar("T")


class Rollouts(Protocol):
    """The scheduler, as a rank sees it."""

    def fetch(self, step: int) -> Share | None:
        """None, on every rank: engines came back and no other has the live weights; they must be published again."""
        ...

    def sample(self, step: int, rows: Sequence[Row]) -> Share | None:
        """None as for ``fetch``."""
        ...

    def publish(self, version: int) -> None: ...
    def evaluate(self) -> tuple[Sums, list[SampleText]] | None:
        """None as for ``fetch``."""
        ...

    def state_dict(self, step: int) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Swap(Protocol):
    """Trainer weights into the engines, verified; and whose turn it is to have the memory they share."""

    def push(self, actor: TrainEngine, version: int, *, must_differ: bool) -> Sums: ...
    def sleep(self) -> Sums: ...
    def reclaim(self) -> None: ...


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
    has_moved: bool = field(default=False, init=False)  # the actor, in the last step

    @property
    def trained(self) -> dict[str, TrainEngine]:
        """The models that checkpoints hold."""
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic is not None else {})

    def save_checkpoint(self, path: str | Path) -> None:
        """Collective, after a step. Everything that the next one depends on, in a folder that this run never removes.

        Raises:
            CheckpointError: it could not be written.
        """
        self.swap.reclaim()
        self.checkpoints.write(self, Path(path))

    def load_checkpoint(self, path: str | Path) -> None:
        """Collective, before ``train``. Continue from such a folder, or from one of a run's own checkpoints.

        Raises:
            CheckpointError: it is damaged, or of another model, backend or number of ranks.
        """
        self.swap.reclaim()
        self.checkpoints.read(self, Path(path))

    def state_dict(self) -> dict[str, Any]:
        """What decides the next step beside the models: the place in the data, and what has been seen of it."""
        state = {"data": self.rollouts.state_dict(self.step), "algorithm": self.algorithm.state_dict()}
        return state if self.reward_model is None else state | {"reward_model": self.reward_model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.has_moved = False  # the weights may be those that the engines have
        self.rollouts.load_state_dict(state["data"])
        self.algorithm.load_state_dict(state["algorithm"])
        if self.reward_model is not None and "reward_model" in state:  # it may have come only now
            self.reward_model.load_state_dict(state["reward_model"])

    def train_step(self) -> None:
        share = self.experience(lambda: self.rollouts.fetch(self.step))
        batch = collate(share.trajectories)
        with self.phase(Phase.score):
            self.score(batch, share)
            self.count(self.algorithm.estimate(batch, self.sum_over_ranks))
        self.log.samples(self.step + 1, [with_estimates(sample, batch) for sample in share.samples])
        with self.phase(Phase.train):
            if self.critic is not None:
                self.count(value_metrics(batch, self.sum_over_ranks), "critic/")
                self.update("critic", batch, share.critic.minibatches, self.algorithm.value_loss, "critic/")
            if self.step >= self.schedule.critic_warmup:
                self.update_actor(batch, share, self.algorithm.policy_loss)
            self.settle(batch, share)
        self.log.add({name: (value, 1) for name, value in self.memory().items()})

    def experience(self, ask: Callable[[], Share | None]) -> Share:
        """A step's responses; the engines that made them sleep then, if they do."""

        def ask_then_rest() -> Share | None:
            share = ask()
            if share is not None:
                self.log.add(self.swap.sleep())
            return share

        share = self.sampled(self.phase, ask_then_rest)
        self.count(share.metrics)
        return share

    def save(self, *, wait: bool) -> None:
        self.swap.reclaim()
        super().save(wait=wait)

    def sampled(self, during: Callable[[Phase], AbstractContextManager], ask: Callable[[], T | None]) -> T:
        """What the scheduler answers; waits. Engines that came back without weights, and are needed, get them first.

        Raises on every rank if an engine is lost for good.
        """
        while True:
            with during(Phase.rollout):
                found = ask()
            if found is not None:
                return found
            self.publish(again=True)

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
            if batch.paid is not None:
                batch.paid = self.reward_model.paid(batch)
            if batch.baseline_rm_scores is not None:
                batch.baselines = self.reward_model.baselines(batch)

    def scored(self, model: Scorer, batch: TokenBatch, cut: list[list[int]]) -> torch.Tensor:
        self.swap.reclaim()
        self.count({"score/tokens": (float(batch.lengths.sum()), 1)})
        return scored(model, batch, cut)

    def update(self, name: str, batch: TokenBatch, *how: Any) -> Sums:
        self.swap.reclaim()  # a loop of one's own may update again after the weights have been published
        return super().update(name, batch, *how)

    def update_actor(self, batch: TokenBatch, share: Share, loss_fn: LossFn) -> None:
        self.update("actor", batch, share.minibatches, loss_fn, "actor/")
        self.has_moved = self.updates.moved

    def settle(self, batch: TokenBatch, share: Share) -> None:
        """Collective, once the step's updates are made."""
        versions = [t.version for t in share.trajectories]
        self.updates.settle(self.step + 1, self.schedule.num_steps, batch, versions)

    def publish(self, *, again: bool = False) -> None:
        """Make the engines sample from the current weights, and tell the scheduler they do.

        Args:
            again: they are those of the last time.
        """
        with self.phase(Phase.sync):
            self.log.add(self.swap.push(self.actor, self.step, must_differ=self.has_moved and not again))
            self.rollouts.publish(self.step)

    def evaluate(self) -> dict[str, float]:
        """Held-out accuracy under the live weights; written apart from a step. Empty without validation data."""
        if not self.has_validation:
            return {}
        self.log.start()
        metrics, samples = self.sampled(self.watch, self.rollouts.evaluate)
        self.log.add(metrics, "eval/")
        self.log.samples(self.step, samples)
        return self.log.finish(self.step, "eval")
