"""The Python interface, for training loops of one's own: thin over what launch/train.py runs.

    with Trainer("configs/quickstart.yaml", ["trainer.experiment_name=mine"]) as trainer:
        policy = trainer.actor_rollout_ref
        while not trainer.finished:
            batch = policy.collect_experience()
            print(policy.update_policy(batch)["rollout/reward_mean"])

Such a script is started like launch/train.py (deepspeed, torchrun, srun), and every rank runs the same lines: each
method is collective. See examples/custom_loop.py.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rlhf_mp.config.yaml_file import read_layers
from rlhf_mp.errors import ConfigError, Problem
from rlhf_mp.prepare import prepare, tell

if TYPE_CHECKING:  # heavy: a config that is wrong is told before they are imported
    from torch import Tensor

    from rlhf_mp.data.prompts import Row
    from rlhf_mp.data.types import LossFn, Share, Sums, TokenBatch
    from rlhf_mp.trainer.trainer import Trainer as Parts


@dataclass(frozen=True)
class ExperienceBatch:
    """What this rank trains on in a step: whole groups of responses to its part of the prompts."""

    tensors: "TokenBatch"  # on CPU; rewards and what the algorithm needs scored are filled in
    share: "Share"  # the same responses as lists, how they are cut, and the metrics of sampling


class Trainer:
    """A run with everything started: the launched ranks, SGLang's servers, the scheduler; resumed where it stood."""

    def __init__(self, config: Mapping[str, Any] | str | Path, overrides: Sequence[str] = ()):
        """
        Args:
            config: a YAML file, or what one would contain.
            overrides: ``key=value``.

        Raises:
            SystemExit: the config has problems, which have been printed. Later failures are printed too and end the
                process, as everything that was started has to end with it.
        """
        try:
            layers = [dict(config)] if isinstance(config, Mapping) else read_layers(Path(config))
            checked, info = prepare(layers, overrides)
        except ConfigError as error:
            sys.exit(tell(error))
        from rlhf_mp.run import launched

        self._launched = launched(checked, info)
        self._job, self._trainer = self._launched.__enter__()
        self.config = checked
        self.actor_rollout_ref = ActorRolloutRef(self._trainer, checked.actor_rollout_ref.rollout.max_staleness)
        self.critic = Critic(self._trainer) if checked.critic.enable else None

    @property
    def step(self) -> int:
        """Steps that are done, those of an earlier start included."""
        return self._trainer.step

    @property
    def finished(self) -> bool:
        return self._trainer.finished

    def train(self) -> None:
        """All that launch/train.py does once everything is started."""
        from rlhf_mp.run import train_to_the_end

        train_to_the_end(self._job, self._trainer)

    def evaluate(self) -> dict[str, float]:
        """Metrics of the held-out prompts under the current weights, between two steps; nothing without such data."""
        self.actor_rollout_ref.serve()
        return self._trainer.evaluate()

    def save_checkpoint(self, path: str | Path) -> None:
        """
        Raises:
            CheckpointError: it could not be written.
        """
        self._trainer.save_checkpoint(path)

    def load_checkpoint(self, path: str | Path) -> None:
        """
        Raises:
            CheckpointError: it is damaged, or of another model, backend or number of ranks.
        """
        self._trainer.load_checkpoint(path)
        self.actor_rollout_ref.serves = False

    def close(self) -> None:
        """End everything that was started."""
        self.__exit__(None, None, None)

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._trainer.log.close()
        self._launched.__exit__(kind, error, trace)


class ActorRolloutRef:
    """The policy with its engines and its reference. Made by ``Trainer``, as they are started once for all models."""

    def __init__(self, parts: "Parts", max_staleness: int):
        self._parts, self._max_staleness = parts, max_staleness
        self.serves = False  # the engines sample from the current weights

    def serve(self) -> None:
        """Make the engines sample from the current weights, if they do not yet."""
        if not self.serves:
            self._parts.publish()
            self._parts.log.start()
            self.serves = True

    def collect_experience(self, prompts: "Sequence[Row] | None" = None) -> ExperienceBatch:
        """``rollout.n`` responses of the current policy to each prompt, rewarded, and scored as the algorithm needs.

        Args:
            prompts: the same on every rank: texts, or rows as the data files have them, so that the reward knows the
                answer. None: the next ``data.train_batch_size`` of the data.

        Raises:
            ConfigError: a prompt that is none, or prompts of one's own while the data's next ones are sampled ahead.
        """
        from rlhf_mp.data.collate import collate
        from rlhf_mp.phase import Phase

        if prompts is not None and self._max_staleness > 0:
            reason = "prompts of one's own come when they are given: nothing can be sampled ahead"
            key = "actor_rollout_ref.rollout.max_staleness"
            raise ConfigError([Problem(key, self._max_staleness, reason, f"{key}=0")])
        self.serve()
        parts = self._parts
        ask = parts.rollouts.fetch if prompts is None else lambda step: parts.rollouts.sample(step, prompts)
        share = parts.experience(lambda: ask(parts.step))
        batch = collate(share.trajectories)
        with parts.phase(Phase.score):
            parts.score(batch, share)
        return ExperienceBatch(batch, share)

    def compute_log_probs(self, batch: ExperienceBatch) -> "Tensor":
        """Of the batch's own tokens under the current weights: [B T], 0 at t = 0 and on padding."""
        return self._parts.scored(self._parts.actor, batch.tensors, batch.share.score_rows)

    def update_policy(self, batch: ExperienceBatch, policy_loss: "LossFn | None" = None) -> dict[str, float]:
        """One optimizer step for each mini-batch, the new weights into the engines; the step is over.

        Advantages come from the config's estimator unless ``batch.tensors.advantages`` is set.

        Args:
            policy_loss: in place of the config's.

        Returns:
            The metrics of the step, those of ``Critic.update`` included; they have been logged.
        """
        from rlhf_mp.phase import Phase

        parts = self._parts
        estimated(parts, batch)
        with parts.phase(Phase.train):
            loss_fn = policy_loss or parts.algorithm.policy_loss
            parts.update_actor(batch.tensors, batch.share, loss_fn)
            parts.settle(batch.tensors, batch.share)
        return parts.end_step()


class Critic:
    """What says how much reward is still to come. Made by ``Trainer``."""

    def __init__(self, parts: "Parts"):
        self._parts = parts

    def compute_values(self, batch: ExperienceBatch) -> "Tensor":
        """Of the state that each of the batch's tokens is drawn from: [B T], 0 at t = 0 and on padding."""
        return self._parts.scored(self._parts.critic, batch.tensors, batch.share.critic.score_rows)

    def update(self, batch: ExperienceBatch, value_loss: "LossFn | None" = None) -> dict[str, float]:
        """One optimizer step for each mini-batch, towards ``batch.tensors.returns``. Returns the critic's metrics."""
        from rlhf_mp.algorithms.value_loss import value_metrics
        from rlhf_mp.phase import Phase

        parts = self._parts
        estimated(parts, batch)
        parts.count(value_metrics(batch.tensors, parts.sum_over_ranks), "critic/")
        with parts.phase(Phase.train):
            loss_fn = value_loss or parts.algorithm.value_loss
            sums = parts.update("critic", batch.tensors, batch.share.critic.minibatches, loss_fn, "critic/")
        return means(parts.log.reduce(sums))


def estimated(parts: "Parts", batch: ExperienceBatch) -> None:
    """Fill in advantages and returns, unless somebody has."""
    if batch.tensors.advantages is None:
        parts.count(parts.algorithm.estimate(batch.tensors, parts.sum_over_ranks))


def means(sums: "Sums") -> dict[str, float]:
    return {name: total / count for name, (total, count) in sorted(sums.items()) if count}
