"""An algorithm is two functions and what they need."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_mp.algorithms.advantages import AdvantageFn, advantage_estimators
from rlhf_mp.algorithms.losses import make_policy_loss
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.data.types import LossFn


@dataclass(frozen=True)
class Algorithm:
    """What turns rewards into updates, and what has to be scored for it."""

    advantage: AdvantageFn
    policy_loss: LossFn
    norm_by_std: bool
    needs_old_logprobs: bool
    needs_reference: bool

    def advantages(
        self, rewards: Float[Tensor, "B"], group_ids: Int[Tensor, "B"], mask: Float[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        with torch.no_grad():
            return self.advantage(rewards, group_ids, mask, norm_by_std=self.norm_by_std)


def updates_per_step(config: RunConfig) -> int:
    """Optimizer steps between two weight versions."""
    actor = config.actor_rollout_ref.actor
    return config.data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs


def make_algorithm(config: RunConfig) -> Algorithm:
    actor = config.actor_rollout_ref.actor
    return Algorithm(
        advantage=advantage_estimators[config.algorithm.adv_estimator],
        policy_loss=make_policy_loss(actor),
        norm_by_std=config.algorithm.norm_adv_by_std_in_grpo,
        # With one update per step the policy that is trained is the one that sampled: scoring it first would only
        # compute the same log-probs twice.
        needs_old_logprobs=updates_per_step(config) > 1,
        needs_reference=actor.use_kl_loss,
    )
