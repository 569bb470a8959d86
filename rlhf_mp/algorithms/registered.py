"""All estimators and policy losses a config can name: importing this module registers them."""

from rlhf_mp.algorithms import (  # noqa: F401
    covariance_losses,
    group_advantages,
    sequence_losses,
    token_advantages,
    token_losses,
)
from rlhf_mp.algorithms.advantages import advantage_estimators
from rlhf_mp.algorithms.policy_loss import policy_losses

__all__ = ["advantage_estimators", "policy_losses"]
