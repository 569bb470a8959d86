"""From rewards to advantages. Sequences with equal group ids answer the same prompt; groups are always whole."""

from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

from rlhf_mp.algorithms.masked import PerSequence, PerToken
from rlhf_mp.registry import Registry

AdvantageFn = Callable[..., PerToken]

advantage_estimators: Registry[AdvantageFn] = Registry("advantage estimator")

STD_EPSILON = 1e-6


@advantage_estimators.register("grpo")
def grpo_advantages(
    rewards: PerSequence, group_ids: Int[Tensor, "B"], mask: PerToken, *, norm_by_std: bool
) -> PerToken:
    """Reward minus the mean of its prompt's group, spread over the response tokens.

    Args:
        rewards: one outcome reward per sequence.
        norm_by_std: divide by the group's sample standard deviation (GRPO); False gives Dr. GRPO.

    Returns:
        Advantages, 0 where ``mask`` is 0. A group of one, or of equal rewards, gets exactly 0.

    Source: GRPO, arXiv:2402.03300 sec. 4.1.2 (outcome supervision); Dr. GRPO, arXiv:2503.20783 sec. 3.2.
    """
    _, group = torch.unique(group_ids, return_inverse=True)  # [B] -> 0..G-1
    size = torch.bincount(group).to(rewards.dtype)  # [G]
    lowest = torch.zeros_like(size).scatter_reduce_(0, group, rewards, "amin", include_self=False)
    # Relative to the group's lowest, equal rewards are exactly 0. Three times 0.1 has a mean that is not 0.1, and
    # dividing that residue by a standard deviation of the same size would make an advantage out of rounding.
    gain = rewards - lowest[group]
    centered = gain - (torch.zeros_like(size).index_add_(0, group, gain) / size)[group]
    if norm_by_std:
        variance = torch.zeros_like(size).index_add_(0, group, centered.square()) / (size - 1).clamp(min=1)
        centered = centered / (variance.sqrt()[group] + STD_EPSILON)
    return centered[:, None] * mask
