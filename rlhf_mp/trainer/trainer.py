"""The RL loop. Runs on every launched rank (SPMD); each line means the same thing on all of them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from rlhf_mp.algorithms.base import Algorithm
from rlhf_mp.algorithms.normalize import SumOverRanks, only_rank
from rlhf_mp.algorithms.value_loss import value_metrics
from rlhf_mp.data.collate import collate, with_estimates
from rlhf_mp.data.types import LossFn, MiniBatch, SampleText, Share, Sums, TokenBatch
from rlhf_mp.observe.memory import peak_memory
from rlhf_mp.observe.metrics import MetricLog
from rlhf_mp.phase import Phase
from rlhf_mp.train.base import Scorer, TrainEngine
from rlhf_mp.trainer.best import Best
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


class Checkpoints(Protocol):
    def save(self, trainer: "Trainer") -> None: ...
    def load_newest(self, trainer: "Trainer") -> None: ...


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


@dataclass
class Trainer:
    """Weight version v is what step v samples from; after ``step`` steps the version is ``step``."""

    schedule: Schedule
    actor: TrainEngine
    reference: Scorer | None
    algorithm: Algorithm
    rollouts: Rollouts
    swap: Swap
    checkpoints: Checkpoints
    log: MetricLog
    watch: Callable[[Phase], AbstractContextManager[None]]  # a phase that hangs is reported
    has_validation: bool
    memory: Callable[[], Mapping[str, float]] = peak_memory
    critic: TrainEngine | None = None
    reward_model: RewardModel | None = None
    sum_over_ranks: SumOverRanks = only_rank
    packed: bool = False  # engines leave out the padding of micro-batches
    counts: bool = True  # False where another rank holds the same data, as a part of the same model
    stop_requested: Callable[[], bool] = lambda: False  # collective; asked once a step
    best: Best | None = None  # None: no validation is better than another
    step: int = 0
    last_grad_norm: float = field(default=0.0, init=False)

    @property
    def trained(self) -> dict[str, TrainEngine]:
        """The models that checkpoints hold."""
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic is not None else {})

    def resume(self) -> None:
        """Continue where the newest checkpoint stands, if there is one."""
        self.checkpoints.load_newest(self)

    @property
    def finished(self) -> bool:
        return self.step >= self.schedule.num_steps

    def data_state(self) -> dict[str, Any]:
        """Where the data stands once ``step`` steps are done, and what algorithm and reward model have seen of it."""
        state = {"rollouts": self.rollouts.state_dict(self.step), "algorithm": self.algorithm.state_dict()}
        return state if self.reward_model is None else state | {"reward_model": self.reward_model.state_dict()}

    def load_data_state(self, state: dict[str, Any]) -> None:
        self.rollouts.load_state_dict(state["rollouts"])
        self.algorithm.load_state_dict(state["algorithm"])
        if self.reward_model is not None and "reward_model" in state:  # it may have come only now
            self.reward_model.load_state_dict(state["reward_model"])

    def train(self) -> None:
        """Train to the last step, or save and return at the end of a step in which a stop was requested."""
        self.publish()
        self.log.start()
        if self.step == 0 and self.schedule.val_before_train:
            self.improves(self.evaluate())
        while not self.finished:
            self.train_step()
            self.step += 1
            self.publish()
            self.log.finish(self.step)
            if not self.finished and self.stop_requested():
                self.checkpoints.save(self)
                return
            metrics = self.evaluate() if self.schedule.due(self.schedule.test_freq, self.step) else {}
            if self.improves(metrics) or self.schedule.due(self.schedule.save_freq, self.step):
                self.checkpoints.save(self)
            self.log.start()

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
