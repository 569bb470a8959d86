"""Policy losses from the ratio of whole responses. Only chosen tokens count; each response's tokens get equal parts."""

import torch

from rlhf_mp.algorithms.kl import LOG_RATIO_MAX
from rlhf_mp.algorithms.masked import PerToken, masked
from rlhf_mp.algorithms.policy_loss import PolicyTerms, policy_losses
from rlhf_mp.algorithms.token_losses import clip
from rlhf_mp.config.schema import ActorConfig
from rlhf_mp.data.types import TokenBatch


def response_mean(x: PerToken, mask: PerToken) -> PerToken:
    """Each response's mean over its chosen tokens, at every token; 0 without any."""
    mean = masked(x, mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return mean.expand_as(x)


@policy_losses.register("gspo")
def gspo(logprobs: PerToken, batch: TokenBatch, actor: ActorConfig) -> PolicyTerms:
    """PPO's clip of the response's ratio, (p / p_old)^(1 / length).

    Written per token, in value that ratio and in gradient each token's share of it, so that advantages may differ
    from token to token. Source: GSPO, arXiv:2507.18071 eq. 5 and 7; per token, eq. 13 and 14 (GSPO-token).
    """
    of_response = response_mean(logprobs.detach() - batch.old_logprobs, batch.mask)
    ratio = (of_response + logprobs - logprobs.detach()).clamp(max=LOG_RATIO_MAX).exp()
    return clip(ratio, batch.advantages, actor)


@policy_losses.register("gmpo")
def gmpo(logprobs: PerToken, batch: TokenBatch, actor: ActorConfig) -> PolicyTerms:
    """-A times the geometric mean of the tokens' ratios, each clipped to [e^-clip_low, e^clip_high] where PPO would.

    Source: GMPO, arXiv:2507.20673 eq. 4 and algorithm 1.
    """
    log_r = logprobs - batch.old_logprobs
    bounded = log_r.clamp(-actor.clip_ratio_low, actor.clip_ratio_high)
    upwards = batch.advantages > 0
    kept = torch.where(upwards, torch.minimum(log_r, bounded), torch.maximum(log_r, bounded))
    ratio = response_mean(kept, batch.mask).clamp(max=LOG_RATIO_MAX).exp()
    clipped = (kept != log_r).to(log_r.dtype)
    metrics = {
        "clip_fraction": clipped,
        "clip_fraction_low": clipped * ~upwards,
        "clip_fraction_high": clipped * upwards,
    }
    return PolicyTerms(-ratio * batch.advantages, metrics)
