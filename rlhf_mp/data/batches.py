"""Examples in batches, each data-parallel rank its own share. No communication: every rank cuts all of them alike."""

from collections.abc import Sequence
from typing import Any

from rlhf_mp.data.examples import Example
from rlhf_mp.data.order import Order
from rlhf_mp.data.partition import Cut, RankPlan, plan_step
from rlhf_mp.data.types import Share
from rlhf_mp.errors import ConfigError, Problem


class Batches:
    """What a supervised task trains on, step by step.

    Args:
        cuts: of training and of forward-only micro-batches; sequences of one example stay together in both.
    """

    def __init__(self, examples: Sequence[Example], order: Order, cuts: tuple[Cut, Cut], dp_rank: int, dp_size: int):
        self.examples, self.order, self.cuts = examples, order, cuts
        self.dp_rank, self.dp_size = dp_rank, dp_size

    def fetch(self) -> Share:
        """This rank's share of the next batch."""
        epoch, indices = self.order.next()
        share = self.share([self.examples[i] for i in indices])
        share.metrics["train/epoch"] = (epoch, 1)
        return share

    def share(self, examples: Sequence[Example]) -> Share:
        """This rank's part of some examples, as one mini-batch.

        Raises:
            ConfigError: there are fewer than ranks.
        """
        if len(examples) < self.dp_size:
            reason = f"{len(examples)} examples for {self.dp_size} ranks that get data of their own"
            raise ConfigError([Problem("data.val_files", len(examples), reason, "fewer ranks, or more examples")])
        trajectories = [t for group, example in enumerate(examples) for t in example.trajectories(group)]
        plan: RankPlan = plan_step(
            [t.num_tokens for t in trajectories],
            [sum(t.loss_mask) for t in trajectories],
            [t.group_id for t in trajectories],
            num_ranks=self.dp_size,
            groups_per_minibatch=len(examples),
            ppo_epochs=1,
            train_cut=self.cuts[0],
            score_cut=self.cuts[1],
            whole_groups=True,
        )[self.dp_rank]
        return Share([trajectories[row] for row in plan.rows], plan.score_rows, plan.minibatches)

    def state_dict(self) -> dict[str, Any]:
        return self.order.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order.load_state_dict(state)
