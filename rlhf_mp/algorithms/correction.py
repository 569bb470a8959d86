"""Engine and trainer disagree a little about every probability: how much, and what is done about it."""

from collections.abc import Callable

import torch

from rlhf_mp.algorithms.kl import k3, log_ratio
from rlhf_mp.algorithms.masked import PerToken
from rlhf_mp.config.algorithm import RolloutCorrectionConfig

Correction = Callable[[PerToken, RolloutCorrectionConfig], PerToken]
"""(ratio trainer / engine) -> weight of the policy loss."""


def tis(ratio: PerToken, settings: RolloutCorrectionConfig) -> PerToken:
    """Truncated importance sampling. Source: fengyao.notion.site/off-policy-rl; arXiv:1802.01561."""
    return ratio.clamp(max=settings.threshold)


def mis(ratio: PerToken, settings: RolloutCorrectionConfig) -> PerToken:
    """Masked importance sampling: nothing is learned from what is above. Source: richardli.xyz/rl-collapse."""
    return torch.where(ratio <= settings.threshold, ratio, 0.0)


def icepop(ratio: PerToken, settings: RolloutCorrectionConfig) -> PerToken:
    """Masked on both sides. Source: IcePop, arXiv:2510.18855 (Ring-1T)."""
    return torch.where((ratio >= settings.threshold_low) & (ratio <= settings.threshold), ratio, 0.0)


CORRECTIONS: dict[str, Correction] = {"tis": tis, "mis": mis, "icepop": icepop}


def rollout_weights(
    old: PerToken, rollout: PerToken, settings: RolloutCorrectionConfig
) -> tuple[PerToken, dict[str, PerToken]]:
    """Weights of the policy loss, and metrics.

    Args:
        old: the trainer's log-probs before the update, 0 off the mask like ``rollout``, the engine's.
    """
    if settings.level == "sequence":  # the product over the response, the same for each of its tokens
        total = (old - rollout).sum(1, keepdim=True)
        ratio = log_ratio(total, torch.zeros_like(total)).exp().expand_as(old)
    else:
        ratio = log_ratio(old, rollout).exp()
    weights = CORRECTIONS[settings.method](ratio, settings)
    changed = (weights != ratio).to(ratio.dtype)
    return weights, {"correction_weight": weights, "correction_fraction": changed}


def mismatch_metrics(old: PerToken, rollout: PerToken) -> dict[str, PerToken]:
    """How far the engine that sampled is from the trainer, token by token."""
    return {
        "rollout_logprob_difference": (rollout - old).abs(),
        "rollout_kl": k3(rollout, old),
        "rollout_log_perplexity_gap": rollout - old,  # log of the trainer's perplexity / the engine's, averaged
    }
