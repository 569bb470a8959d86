"""From rewards to advantages: the contract every estimator keeps. docs/algorithms.md lists those there are."""

from collections.abc import Callable
from dataclasses import dataclass

from rlhf_mp.algorithms.masked import PerToken
from rlhf_mp.config.algorithm import AlgorithmConfig
from rlhf_mp.data.types import TokenBatch
from rlhf_mp.registry import Registry


@dataclass(frozen=True)
class Estimate:
    """What an estimator says about one rank's responses."""

    advantages: PerToken  # 0 where the mask is 0
    returns: PerToken | None = None  # what a critic's values are trained towards


Estimator = Callable[[TokenBatch, AlgorithmConfig], Estimate]
"""(one rank's responses, in whole groups; the ``algorithm`` section) -> advantages.

``batch.rewards`` [B] is what each response earned, ``batch.token_rewards`` [B T] where in it: at its last chosen token
and, of episodes, at the ends of the turns that an environment paid for, less the KL penalty of each token if there is
one. Equal ``batch.group_ids`` answer the same prompt.
"""

advantage_estimators: Registry[Estimator] = Registry("advantage estimator")
