"""What is done to the advantages of all ranks together. The number of ranks changes nothing."""

from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_mp.algorithms.group_advantages import Groups
from rlhf_mp.algorithms.masked import PerToken, masked
from rlhf_mp.data.types import TokenBatch

SumOverRanks = Callable[[Tensor], Tensor]
"""The sum of the data-parallel ranks' tensors, alike on all of them. Collective."""

VARIANCE_EPSILON = 1e-8


def only_rank(x: Tensor) -> Tensor:
    """``SumOverRanks`` of one process."""
    return x


def keep(advantages: PerToken, batch: TokenBatch, sum_over_ranks: SumOverRanks) -> PerToken:
    return advantages


def whiten(advantages: PerToken, batch: TokenBatch, sum_over_ranks: SumOverRanks) -> PerToken:
    """Mean 0 and variance 1 over the chosen tokens, in double precision: ranks add up to the same digits."""
    x, mask = advantages.double(), batch.mask
    mean, variance, _ = moments(x, mask, sum_over_ranks)
    return masked((x - mean) * (variance + VARIANCE_EPSILON).rsqrt(), mask).to(advantages.dtype)


def moments(x: PerToken, mask: PerToken, sum_over_ranks: SumOverRanks) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, sample variance and number of the chosen tokens of all ranks; 0, 0 and 0 without any."""
    x = x.double()
    total, count = sum_over_ranks(torch.stack([masked(x, mask).sum(), mask.double().sum()]))
    mean = total / count.clamp(min=1)
    (squares,) = sum_over_ranks(masked((x - mean).square(), mask).sum()[None])
    return mean, squares / (count - 1).clamp(min=1), count


def make_up_for_groups_without_spread(
    advantages: PerToken, batch: TokenBatch, sum_over_ranks: SumOverRanks
) -> PerToken:
    """Times all responses / responses of groups that teach something. Source: GPG, arXiv:2504.02546."""
    groups = Groups.of(batch)
    teaches = (advantages != 0).any(1).to(batch.rewards.dtype)
    in_teaching_group = groups.extreme(teaches, "amax")[groups.index]
    ours = torch.stack([torch.ones_like(teaches).double().sum(), in_teaching_group.double().sum()])
    num_responses, num_teaching = sum_over_ranks(ours)
    return advantages * (num_responses / num_teaching.clamp(min=1)).to(advantages.dtype)


NORMALIZATIONS: dict[str, Callable[[PerToken, TokenBatch, SumOverRanks], PerToken]] = {
    "none": keep,
    "whiten": whiten,
    "spread": make_up_for_groups_without_spread,
}
