"""Estimators of KL(policy || reference) from log-probs of tokens sampled from the policy.

Source: joschu.net/blog/kl-approx.html, whose r is reference / policy.
"""

from collections.abc import Callable

import torch

from rlhf_mp.algorithms.masked import PerToken
from rlhf_mp.registry import Registry

KlEstimator = Callable[[PerToken, PerToken], PerToken]
"""(log-probs, reference log-probs) -> estimate per token."""

kl_estimators: Registry[KlEstimator] = Registry("KL estimator")

LOG_RATIO_MAX = 20.0  # e^20 = 4.9e8; float32 overflows at e^88, and one such token would outweigh a batch long before


def log_ratio(numerator: PerToken, denominator: PerToken) -> PerToken:
    """Log of a probability ratio that is about to be exponentiated: bounded above, where it has no gradient."""
    return (numerator - denominator).clamp(max=LOG_RATIO_MAX)


@kl_estimators.register("k1")
def k1(logprobs: PerToken, reference: PerToken) -> PerToken:
    """Unbiased, can be negative. As a loss its expected gradient is zero: a measure, not a penalty."""
    return logprobs - reference


@kl_estimators.register("k2")
def k2(logprobs: PerToken, reference: PerToken) -> PerToken:
    """Biased, never negative, low variance."""
    return (logprobs - reference).square() / 2


@kl_estimators.register("k3")
def k3(logprobs: PerToken, reference: PerToken) -> PerToken:
    """Unbiased and never negative. ``expm1`` keeps the digits that ``exp(x) - 1`` loses for nearly equal log-probs."""
    log_r = log_ratio(reference, logprobs)
    return torch.expm1(log_r) - log_r
