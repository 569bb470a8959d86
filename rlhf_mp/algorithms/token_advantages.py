"""Advantages that differ from token to token. Tokens the policy did not choose take no time and earn nothing."""

import torch

from rlhf_mp.algorithms.advantages import Estimate, advantage_estimators
from rlhf_mp.algorithms.masked import PerSequence, PerToken, masked
from rlhf_mp.config.algorithm import AlgorithmConfig
from rlhf_mp.data.types import TokenBatch


def on_last_token(rewards: PerSequence, mask: PerToken) -> PerToken:
    """Each response's reward at the last token that the policy chose; a response without one has no place for it."""
    position = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask > 0, position, -1).amax(1)  # [B]
    return torch.where(position == last[:, None], rewards[:, None], 0.0)


def where_earned(batch: TokenBatch) -> PerToken:
    """Each response's reward: what an environment paid at the ends of its turns, the rest at the last chosen token."""
    if batch.paid is None:
        return on_last_token(batch.rewards, batch.mask)
    paid = masked(batch.paid, batch.mask)
    return paid + on_last_token(batch.rewards - paid.sum(1), batch.mask)


def discounted_errors(rewards: PerToken, values: PerToken, mask: PerToken, gamma: float, decay: float) -> PerToken:
    """Sum over the chosen tokens from t on of decay^k * (r + gamma * V' - V), V' the next chosen token's value."""
    total = torch.zeros_like(rewards[:, 0])  # [B]
    next_value = torch.zeros_like(total)
    sums = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        chosen = mask[:, t] > 0
        error = rewards[:, t] + gamma * next_value - values[:, t]
        total = torch.where(chosen, error + decay * total, total)
        next_value = torch.where(chosen, values[:, t], next_value)
        sums[:, t] = total
    return masked(sums, mask)


def rewards_to_go(batch: TokenBatch, gamma: float) -> PerToken:
    return discounted_errors(batch.token_rewards, torch.zeros_like(batch.mask), batch.mask, gamma, decay=gamma)


@advantage_estimators.register("gae")
def gae(batch: TokenBatch, settings: AlgorithmConfig) -> Estimate:
    """Exponentially weighted temporal differences of a critic's values; whitened afterwards over all ranks.

    Source: arXiv:1506.02438 eq. 16; returns are advantages before whitening + values.
    """
    if batch.values is None:
        raise ValueError("gae needs batch.values: a critic has to score the batch first")
    values, gamma = masked(batch.values, batch.mask), settings.gamma
    advantages = discounted_errors(batch.token_rewards, values, batch.mask, gamma, decay=gamma * settings.lam)
    return Estimate(advantages, returns=advantages + values)


@advantage_estimators.register("reinforce")
def reinforce(batch: TokenBatch, settings: AlgorithmConfig) -> Estimate:
    """The discounted rewards still to come, without a baseline. Source: Williams 1992, doi:10.1007/BF00992696."""
    return Estimate(rewards_to_go(batch, settings.gamma))


@advantage_estimators.register("reinforce_plus_plus")
def reinforce_plus_plus(batch: TokenBatch, settings: AlgorithmConfig) -> Estimate:
    """The rewards still to come; whitened afterwards over all ranks. Source: REINFORCE++, arXiv:2501.03262."""
    return reinforce(batch, settings)


@advantage_estimators.register("remax")
def remax(batch: TokenBatch, settings: AlgorithmConfig) -> Estimate:
    """The rewards still to come, less the reward of the greedy response. Source: ReMax, arXiv:2310.10505."""
    if batch.baselines is None:
        raise ValueError("remax needs batch.baselines: the reward of a greedy response to each prompt")
    return Estimate(masked(rewards_to_go(batch, 1.0) - batch.baselines[:, None], batch.mask))
