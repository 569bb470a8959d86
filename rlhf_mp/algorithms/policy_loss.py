"""Policy losses: the contract every one keeps. docs/algorithms.md lists those there are."""

from collections.abc import Callable
from dataclasses import dataclass, field

from rlhf_mp.algorithms.masked import PerToken
from rlhf_mp.config.schema import ActorConfig
from rlhf_mp.data.types import TokenBatch
from rlhf_mp.registry import Registry


@dataclass(frozen=True)
class PolicyTerms:
    """A policy loss before it is added up."""

    loss: PerToken  # what is off the mask does not count
    metrics: dict[str, PerToken] = field(default_factory=dict)  # averaged over the tokens


PolicyLoss = Callable[[PerToken, TokenBatch, ActorConfig], PolicyTerms]
"""(log-probs with gradient, 0 off the mask; the micro-batch; the ``actor`` section) -> loss per token.

``batch.old_logprobs`` are the log-probs before the step's first update, 0 off the mask; ``batch.advantages`` are there
too. Whole responses are in a micro-batch, but neither all of a group nor all of a mini-batch.
"""

policy_losses: Registry[PolicyLoss] = Registry("policy loss")
