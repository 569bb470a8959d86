"""Advantages from comparing the responses to one prompt; every chosen token gets its response's."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_mp.algorithms.advantages import Estimate, advantage_estimators
from rlhf_mp.algorithms.masked import PerSequence
from rlhf_mp.config.algorithm import AlgorithmConfig
from rlhf_mp.data.types import TokenBatch

STD_EPSILON = 1e-6


@dataclass(frozen=True)
class Groups:
    """Rows by prompt: sums over each group, back to its rows by ``[index]``."""

    index: Int[Tensor, "B"]  # 0..G-1
    size: Float[Tensor, "G"]

    @staticmethod
    def of(batch: TokenBatch) -> "Groups":
        _, index = torch.unique(batch.group_ids, return_inverse=True)
        return Groups(index, torch.bincount(index).to(batch.rewards.dtype))

    def sum(self, x: PerSequence) -> Float[Tensor, "G"]:
        return torch.zeros_like(self.size).index_add_(0, self.index, x)

    def extreme(self, x: PerSequence, which: str) -> Float[Tensor, "G"]:
        """``which``: amin or amax."""
        return torch.zeros_like(self.size).scatter_reduce_(0, self.index, x, which, include_self=False)

    def gain(self, x: PerSequence) -> PerSequence:
        """Above the group's lowest: exactly 0 for equal rewards.

        Three times 0.1 has a mean that is not 0.1, and dividing that residue by a standard deviation of the same size
        would make an advantage out of rounding.
        """
        return x - self.extreme(x, "amin")[self.index]

    def centered(self, x: PerSequence) -> PerSequence:
        """Less the group's mean; 0 in a group of one."""
        gain = self.gain(x)
        return gain - (self.sum(gain) / self.size)[self.index]

    def std(self, centered: PerSequence) -> PerSequence:
        """Sample standard deviation of each row's group; 0 of a group of one."""
        variance = self.sum(centered.square()) / (self.size - 1).clamp(min=1)
        return variance.sqrt()[self.index]


def spread_out(of_response: PerSequence, batch: TokenBatch) -> Estimate:
    return Estimate(of_response[:, None] * batch.mask)


@advantage_estimators.register("grpo")
def grpo(batch: TokenBatch, settings: AlgorithmConfig) -> Estimate:
    """Reward less its group's mean, by its standard deviation; exactly 0 for equal rewards and in a group of one.

    Source: GRPO, arXiv:2402.03300 sec. 4.1.2 (outcome supervision).
    """
    if not settings.norm_adv_by_std_in_grpo:
        return dr_grpo(batch, settings)
    groups = Groups.of(batch)
    centered = groups.centered(batch.rewards)
    return spread_out(centered / (groups.std(centered) + STD_EPSILON), batch)


@advantage_estimators.register("dr_grpo")
def dr_grpo(batch: TokenBatch, settings: AlgorithmConfig) -> Estimate:
    """Reward less its group's mean. Source: Dr. GRPO, arXiv:2503.20783 sec. 3.2."""
    return spread_out(Groups.of(batch).centered(batch.rewards), batch)


@advantage_estimators.register("rloo")
def rloo(batch: TokenBatch, settings: AlgorithmConfig) -> Estimate:
    """Reward less the mean of the other responses'. Source: RLOO, arXiv:2402.14740.

    r - (S - r) / (n - 1) = n / (n - 1) * (r - S / n).
    """
    groups = Groups.of(batch)
    factor = groups.size / (groups.size - 1).clamp(min=1)
    return spread_out(groups.centered(batch.rewards) * factor[groups.index], batch)


@advantage_estimators.register("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(batch: TokenBatch, settings: AlgorithmConfig) -> Estimate:
    """Reward less its group's mean; whitened afterwards over all ranks. Source: REINFORCE++, arXiv:2501.03262."""
    return dr_grpo(batch, settings)


@advantage_estimators.register("gpg")
def gpg(batch: TokenBatch, settings: AlgorithmConfig) -> Estimate:
    """Reward less its group's mean; scaled afterwards by all responses / responses of groups with spread.

    Source: GPG, arXiv:2504.02546, alpha = B / (B - M), with F_norm = 1.
    """
    return dr_grpo(batch, settings)


@advantage_estimators.register("opo")
def opo(batch: TokenBatch, settings: AlgorithmConfig) -> Estimate:
    """Reward less the group's mean weighed by length, the baseline of least variance. Source: arXiv:2505.23585."""
    groups = Groups.of(batch)
    length, gain = batch.mask.sum(1), groups.gain(batch.rewards)
    baseline = groups.sum(length * gain) / groups.sum(length).clamp(min=1)
    return spread_out(gain - baseline[groups.index], batch)


@advantage_estimators.register("grpo_passk")
def grpo_passk(batch: TokenBatch, settings: AlgorithmConfig) -> Estimate:
    """What the best response adds to the group's best reward, above the second best; the others get 0, and so do ties.

    Source: arXiv:2503.19595 (max@k with a leave-one-out baseline), where it is not divided by a standard deviation.
    """
    groups, rewards = Groups.of(batch), batch.rewards
    is_best = rewards == groups.extreme(rewards, "amax")[groups.index]
    is_only_best = (
        is_best & (groups.sum(is_best.to(rewards.dtype)) == 1)[groups.index] & (groups.size > 1)[groups.index]
    )
    second = groups.extreme(torch.where(is_best, groups.extreme(rewards, "amin")[groups.index], rewards), "amax")
    lead = torch.where(is_only_best, rewards - second[groups.index], 0.0)
    if settings.norm_adv_by_std_in_grpo:
        lead = lead / (groups.std(groups.centered(rewards)) + STD_EPSILON)
    return spread_out(lead, batch)
