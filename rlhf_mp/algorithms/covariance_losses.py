"""Losses that hold back the tokens which lower the entropy most: those whose advantage goes with their log-prob.

Source: arXiv:2505.22617 sec. 4.2, eq. 10 to 14 and listing 1. There tokens are chosen anew in every mini-batch of a
rank; here once per step, from all ranks and by the log-probs before the update, so that neither ranks nor the cut
change which they are.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from rlhf_mp.algorithms.kl import log_ratio
from rlhf_mp.algorithms.masked import PerToken
from rlhf_mp.algorithms.normalize import SumOverRanks, moments
from rlhf_mp.algorithms.policy_loss import PolicyTerms, policy_losses
from rlhf_mp.algorithms.token_losses import clip
from rlhf_mp.config.schema import ActorConfig
from rlhf_mp.data.types import TokenBatch

Selection = Callable[[TokenBatch, ActorConfig, SumOverRanks], PerToken]
"""Before the first update: 1 at the tokens to be treated apart. Collective."""


@policy_losses.register("kl_cov")
def kl_cov(logprobs: PerToken, batch: TokenBatch, actor: ActorConfig) -> PolicyTerms:
    """-r A, and for selected tokens the distance from the old policy, ppo_kl_coef |log r|."""
    ratio = log_ratio(logprobs, batch.old_logprobs).exp()
    distance = actor.ppo_kl_coef * (logprobs - batch.old_logprobs).abs()
    return PolicyTerms(-ratio * batch.advantages + batch.selected * distance, {"selected_fraction": batch.selected})


@policy_losses.register("clip_cov")
def clip_cov(logprobs: PerToken, batch: TokenBatch, actor: ActorConfig) -> PolicyTerms:
    """PPO's clip, without the selected tokens."""
    terms = clip(log_ratio(logprobs, batch.old_logprobs).exp(), batch.advantages, actor)
    return PolicyTerms(terms.loss * (1 - batch.selected), terms.metrics | {"selected_fraction": batch.selected})


def covariances(batch: TokenBatch, sum_over_ranks: SumOverRanks) -> tuple[PerToken, int]:
    """(A - mean A) (log p - mean log p) of each token, and how many tokens there are."""
    advantage, _, count = moments(batch.advantages, batch.mask, sum_over_ranks)
    logprob, _, _ = moments(batch.old_logprobs, batch.mask, sum_over_ranks)
    product = (batch.advantages.double() - advantage) * (batch.old_logprobs.double() - logprob)
    return product.float(), int(count)


def select_kl_cov(batch: TokenBatch, actor: ActorConfig, sum_over_ranks: SumOverRanks) -> PerToken:
    """The kl_cov_ratio of all tokens with the largest covariance; only those above 0, which the paper does not ask."""
    covariance, num_tokens = covariances(batch, sum_over_ranks)
    size = covariance.view(torch.int32).long()  # positive floats are in the order of their bits
    return largest(size, (batch.mask > 0) & (covariance > 0), num_tokens * actor.kl_cov_ratio, sum_over_ranks)


def select_clip_cov(batch: TokenBatch, actor: ActorConfig, sum_over_ranks: SumOverRanks) -> PerToken:
    """The clip_cov_ratio of all tokens, drawn from those of covariance between clip_cov_lb and clip_cov_ub."""
    covariance, num_tokens = covariances(batch, sum_over_ranks)
    between = (covariance > actor.clip_cov_lb) & (covariance < actor.clip_cov_ub) & (batch.mask > 0)
    return largest(lots(batch), between, num_tokens * actor.clip_cov_ratio, sum_over_ranks)


SELECTIONS: dict[str, Selection] = {"kl_cov": select_kl_cov, "clip_cov": select_clip_cov}


def lots(batch: TokenBatch) -> Int[Tensor, "B T"]:
    """A number below 2^31 for each token, made from its response and place: the same wherever the response stands."""
    place = torch.arange(1, batch.tokens.shape[1] + 1, device=batch.tokens.device)
    row = (batch.tokens * (place * 6364136223846793005)).sum(1, keepdim=True)  # padding is 0; int64 wraps around
    mixed = (row + place) * 1442695040888963407
    mixed = (mixed ^ (mixed >> 31)) * 3935559000370003845
    return (mixed ^ (mixed >> 29)) & (2**31 - 1)


def largest(
    keys: Int[Tensor, "B T"], among: Bool[Tensor, "B T"], how_many: float, sum_over_ranks: SumOverRanks
) -> PerToken:
    """1 at the so many largest keys of all ranks (at least one, and all of a tie), else 0."""
    candidates = keys[among]
    num_candidates = int(sum_over_ranks(torch.tensor([len(candidates)], dtype=torch.float64)))
    if num_candidates == 0:
        return torch.zeros(keys.shape)
    limit = kth_largest(candidates, min(max(1, int(how_many)), num_candidates), sum_over_ranks)
    return (among & (keys >= limit)).float()


def kth_largest(keys: Int[Tensor, "N"], k: int, sum_over_ranks: SumOverRanks) -> int:
    """Of the ranks' keys from 0 to 2^32 - 1 together: byte by byte, from counts alone."""
    found = 0
    for shift in (24, 16, 8, 0):
        alike = keys[keys >> (shift + 8) == found]
        counts = sum_over_ranks(torch.bincount(alike >> shift & 255, minlength=256).double()).tolist()
        byte = 255
        while counts[byte] < k:
            k -= counts[byte]
            byte -= 1
        found = found << 8 | byte
    return found
