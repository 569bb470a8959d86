"""A reward model in the loop: scores of the training ranks, normalised, clipped, beside the rule reward."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_mp.algorithms.masked import PerSequence
from rlhf_mp.config.schema import RewardModelConfig
from rlhf_mp.data.types import Sums, TokenBatch
from rlhf_mp.train.base import Scorer


@dataclass
class RunningMoments:
    """Mean and variance of everything seen so far, in float64.

    Source: Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing sample variances (1979).
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared distances from the mean

    def add(self, count: float, mean: float, squares: float) -> None:
        """The same three numbers of further values."""
        total = self.count + count
        if not total:
            return
        step = mean - self.mean
        self.squares += squares + step**2 * self.count * count / total
        self.mean += step * count / total
        self.count = total

    @property
    def std(self) -> float:
        """Of the population; 1 as long as all values are equal, so that dividing by it changes nothing."""
        return (self.squares / self.count) ** 0.5 if self.squares > 0 else 1.0


class RewardModel:
    """Scores responses and makes them rewards. Its moments are part of a checkpoint.

    Args:
        sum_over_ranks: adds a small tensor over all ranks; collective.
        counts: False where another rank holds the same responses.
    """

    def __init__(
        self, scorer: Scorer, config: RewardModelConfig, sum_over_ranks: Callable[[Tensor], Tensor], *, counts: bool
    ):
        self.scorer, self.config, self.sum_over_ranks, self.counts = scorer, config, sum_over_ranks, counts
        self.moments = RunningMoments()

    def rewards(self, batch: TokenBatch, cut: list[list[int]]) -> tuple[PerSequence, Sums]:
        """The reward of each row, from its rule reward ``batch.rewards`` and its score. Collective.

        Returns:
            The rewards, and metrics of this rank's rows: raw scores, what they became, and the rewards.
        """
        scores = self._scores(batch, cut)
        self._learn(scores)
        shaped = scores
        if self.config.normalize:
            shaped = (scores - self.moments.mean) / self.moments.std
        limit = self.config.clip
        clipped = shaped if limit is None else shaped.clamp(-limit, limit)
        rewards = (self.config.rule_coef * batch.rewards + self.config.coef * clipped).float()
        rows = len(scores)
        metrics = {
            "score_mean": (scores.sum().item(), rows),
            "score_square_mean": (scores.square().sum().item(), rows),
            "clipped_fraction": ((clipped != shaped).sum().item(), rows),
            "reward_mean": (rewards.sum().item(), rows),
        }
        return rewards, metrics

    def _scores(self, batch: TokenBatch, cut: list[list[int]]) -> Tensor:
        scores = torch.zeros(len(batch.rewards), dtype=torch.float64)
        for rows, found in zip(cut, self.scorer.score([batch.select(rows) for rows in cut]), strict=True):
            if rows:  # an empty micro-batch only keeps the ranks in step
                scores[rows] = found.double()
        return scores

    def _learn(self, scores: Tensor) -> None:
        """Add all ranks' scores to the moments, this step's included: the first step is normalised too."""
        own = scores if self.counts else scores[:0]
        count, total = self.sum_over_ranks(torch.tensor([float(len(own)), own.sum()], dtype=torch.float64)).tolist()
        mean = total / count
        (squares,) = self.sum_over_ranks((own - mean).square().sum()[None]).tolist()
        self.moments.add(count, mean, squares)

    def state_dict(self) -> dict[str, Any]:
        moments = self.moments
        return {"count": moments.count, "mean": moments.mean, "squares": moments.squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moments = RunningMoments(**state)
