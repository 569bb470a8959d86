"""A reward model in the loop: its scores, normalised, clipped, beside the rule reward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_mp.algorithms.masked import PerSequence, PerToken
from rlhf_mp.config.reward_model import RewardModelConfig
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


class SampledScores:
    """The part of a ``Scorer`` that is needed where servers scored the responses when they were sampled."""

    def score(self, micro_batches: Sequence[TokenBatch]) -> list[Tensor]:
        return [batch.rm_scores for batch in micro_batches]


class RewardModel:
    """Scores responses and makes them rewards. Its moments are part of a checkpoint.

    Args:
        sum_over_ranks: adds a small tensor over all ranks, responses that several of them hold once; collective.
    """

    def __init__(
        self, scorer: Scorer | SampledScores, config: RewardModelConfig, sum_over_ranks: Callable[[Tensor], Tensor]
    ):
        self.scorer, self.config, self.sum_over_ranks = scorer, config, sum_over_ranks
        self.moments = RunningMoments()

    def rewards(self, batch: TokenBatch, cut: list[list[int]]) -> tuple[PerSequence, Sums]:
        """The reward of each row, from its rule reward ``batch.rewards`` and its score. Collective.

        Returns:
            The rewards, and metrics of this rank's rows: raw scores, what they became, and the rewards.
        """
        scores = self._scores(batch, cut)
        self._learn(scores)
        shaped = self._normalized(scores)
        clipped = self._clipped(shaped)
        rewards = self._sum(batch.rewards, clipped)
        rows = len(scores)
        metrics = {
            "score_mean": (scores.sum().item(), rows),
            "score_square_mean": (scores.square().sum().item(), rows),
            "clipped_fraction": ((clipped != shaped).sum().item(), rows),
            "reward_mean": (rewards.sum().item(), rows),
        }
        return rewards, metrics

    def baselines(self, batch: TokenBatch) -> PerSequence:
        """Rewards of the greedy responses, shaped like those of this step. Nothing is learned from their scores."""
        return self._sum(batch.baselines, self._clipped(self._normalized(batch.baseline_rm_scores.double())))

    def paid(self, batch: TokenBatch) -> PerToken:
        """What of the new rewards an environment paid, and where."""
        return self.config.rule_coef * batch.paid

    def _normalized(self, scores: Tensor) -> Tensor:
        return (scores - self.moments.mean) / self.moments.std if self.config.normalize else scores

    def _clipped(self, shaped: Tensor) -> Tensor:
        limit = self.config.clip
        return shaped if limit is None else shaped.clamp(-limit, limit)

    def _sum(self, rule_rewards: Tensor, scores: Tensor) -> PerSequence:
        return (self.config.rule_coef * rule_rewards + self.config.coef * scores).float()

    def _scores(self, batch: TokenBatch, cut: list[list[int]]) -> Tensor:
        scores = torch.zeros(len(batch.rewards), dtype=torch.float64)
        for rows, found in zip(cut, self.scorer.score([batch.select(rows) for rows in cut]), strict=True):
            if rows:  # an empty micro-batch only keeps the ranks in step
                scores[rows] = found.double()
        return scores

    def _learn(self, scores: Tensor) -> None:
        """Add all ranks' scores to the moments, this step's included: the first step is normalised too."""
        count, total = self.sum_over_ranks(torch.stack([torch.ones_like(scores).sum(), scores.sum()])).tolist()
        mean = total / count
        (squares,) = self.sum_over_ranks((scores - mean).square().sum()[None]).tolist()
        self.moments.add(count, mean, squares)

    def state_dict(self) -> dict[str, Any]:
        moments = self.moments
        return {"count": moments.count, "mean": moments.mean, "squares": moments.squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moments = RunningMoments(**state)
