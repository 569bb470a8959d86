"""Policy losses from each token's own ratio between the policy and the old one."""

import torch

from rlhf_mp.algorithms.kl import log_ratio
from rlhf_mp.algorithms.masked import PerToken
from rlhf_mp.algorithms.policy_loss import PolicyTerms, policy_losses
from rlhf_mp.config.schema import ActorConfig
from rlhf_mp.data.types import TokenBatch


def clip(ratio: PerToken, advantages: PerToken, actor: ActorConfig) -> PolicyTerms:
    """-min(r A, clip(r) A), and where the clip decided it: for positive advantages the upper one, else the lower."""
    free = -ratio * advantages
    bounded = -ratio.clamp(1 - actor.clip_ratio_low, 1 + actor.clip_ratio_high) * advantages
    clipped = (bounded > free).to(free.dtype)
    metrics = {
        "clip_fraction": clipped,
        "clip_fraction_low": clipped * (advantages < 0),
        "clip_fraction_high": clipped * (advantages > 0),
    }
    return PolicyTerms(torch.maximum(free, bounded), metrics)


@policy_losses.register("ppo_clip")
def ppo_clip(logprobs: PerToken, batch: TokenBatch, actor: ActorConfig) -> PolicyTerms:
    """PPO's clipped surrogate: no gradient once the ratio has left [1 - clip_low, 1 + clip_high] in its own direction.

    Source: arXiv:1707.06347 eq. 7; separate upper bound ("clip-higher"), DAPO arXiv:2503.14476 eq. 10; an upper bound
    c for negative advantages too ("dual clip"), arXiv:1912.09729.
    """
    ratio = log_ratio(logprobs, batch.old_logprobs).exp()
    terms = clip(ratio, batch.advantages, actor)
    if actor.clip_ratio_c is None:
        return terms
    most = -actor.clip_ratio_c * batch.advantages
    beyond = (batch.advantages < 0) & (terms.loss > most)
    return PolicyTerms(
        torch.where(beyond, most, terms.loss), terms.metrics | {"clip_fraction_dual": beyond.to(ratio.dtype)}
    )


@policy_losses.register("policy_gradient")
def policy_gradient(logprobs: PerToken, batch: TokenBatch, actor: ActorConfig) -> PolicyTerms:
    """-A log p: neither ratio nor clip. Source: Williams 1992, doi:10.1007/BF00992696; GPG, arXiv:2504.02546."""
    return PolicyTerms(-logprobs * batch.advantages)


@policy_losses.register("cispo")
def cispo(logprobs: PerToken, batch: TokenBatch, actor: ActorConfig) -> PolicyTerms:
    """-sg(clip(r)) A log p: a far token weighs less, and none loses its gradient.

    Source: MiniMax-M1, arXiv:2506.13585 eq. 4 and 5.
    """
    ratio = log_ratio(logprobs.detach(), batch.old_logprobs).exp()
    weight = ratio.clamp(1 - actor.clip_ratio_low, 1 + actor.clip_ratio_high)
    metrics = {
        "clip_fraction": (weight != ratio).to(ratio.dtype),
        "clip_fraction_low": (weight > ratio).to(ratio.dtype),
        "clip_fraction_high": (weight < ratio).to(ratio.dtype),
    }
    return PolicyTerms(-weight * batch.advantages * logprobs, metrics)


@policy_losses.register("sapo")
def sapo(logprobs: PerToken, batch: TokenBatch, actor: ActorConfig) -> PolicyTerms:
    """-(4 / tau) sigmoid(tau (r - 1)) A: a soft gate, whose slope at r = 1 is that of r A.

    Source: SAPO, arXiv:2511.20347 eq. 5 and 6.
    """
    ratio = log_ratio(logprobs, batch.old_logprobs).exp()
    tau = torch.where(batch.advantages > 0, actor.tau_pos, actor.tau_neg)
    return PolicyTerms(-torch.sigmoid(tau * (ratio - 1)) * (4 / tau) * batch.advantages)
