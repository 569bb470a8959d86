"""An advantage estimator and a policy loss of one's own, used without touching rlhf_mp:

  deepspeed --num_gpus 2 launch/train.py --config configs/quickstart.yaml \
      algorithm.adv_estimator=examples.own_algorithm:above_median \
      actor_rollout_ref.actor.policy_loss=examples.own_algorithm:positive_only

Both are tried on a tiny batch at start-up. docs/algorithms.md says what they get and give.
"""

import torch

from rlhf_mp.algorithms.advantages import Estimate
from rlhf_mp.algorithms.masked import PerToken
from rlhf_mp.algorithms.policy_loss import PolicyTerms
from rlhf_mp.config.algorithm import AlgorithmConfig, Needs
from rlhf_mp.config.schema import ActorConfig
from rlhf_mp.data.types import TokenBatch


def above_median(batch: TokenBatch, settings: AlgorithmConfig) -> Estimate:
    """Reward less the median of the group's: one outlier does not move the others."""
    advantages = torch.zeros_like(batch.rewards)
    for group in batch.group_ids.unique():
        rows = batch.group_ids == group
        advantages[rows] = batch.rewards[rows] - batch.rewards[rows].quantile(0.5)
    return Estimate(advantages[:, None] * batch.mask)


above_median.needs = Needs(min_responses=2, normalize="whiten")


def positive_only(logprobs: PerToken, batch: TokenBatch, actor: ActorConfig) -> PolicyTerms:
    """The clipped surrogate of what was better than the rest; the rest is only not repeated."""
    ratio = (logprobs - batch.old_logprobs).exp()
    gains = batch.advantages.clamp(min=0)
    loss = -torch.minimum(ratio, ratio.detach().clamp(max=1 + actor.clip_ratio_high)) * gains
    return PolicyTerms(loss, {"positive_fraction": (gains > 0).float()})
