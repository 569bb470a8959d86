"""An algorithm: how rewards become advantages, what the policy is trained with, and what has to be scored for it."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from rlhf_mp.algorithms.advantages import Estimator
from rlhf_mp.algorithms.contract import checked_estimator, checked_policy_loss
from rlhf_mp.algorithms.covariance_losses import SELECTIONS
from rlhf_mp.algorithms.losses import make_policy_loss
from rlhf_mp.algorithms.masked import PerToken, masked
from rlhf_mp.algorithms.normalize import NORMALIZATIONS, SumOverRanks, moments, only_rank
from rlhf_mp.algorithms.reward_kl import RewardKl
from rlhf_mp.algorithms.token_advantages import where_earned
from rlhf_mp.algorithms.value_loss import make_value_loss
from rlhf_mp.config.algorithm import AlgorithmConfig, Needs
from rlhf_mp.config.schema import ActorConfig, RunConfig
from rlhf_mp.data.types import LossFn, Sums, TokenBatch
from rlhf_mp.errors import SampleError


@dataclass(frozen=True)
class Algorithm:
    """What turns rewards into updates. Its only state is the weight of the KL penalty."""

    estimator: Estimator
    settings: AlgorithmConfig
    actor: ActorConfig
    policy_loss: LossFn
    needs: Needs = Needs()
    needs_old_logprobs: bool = False
    needs_reference: bool = False
    reward_kl: RewardKl | None = None
    value_loss: LossFn | None = None

    @property
    def needs_critic(self) -> bool:
        return self.needs.critic

    @property
    def needs_greedy_baseline(self) -> bool:
        return self.needs.greedy_baseline

    @torch.no_grad()
    def estimate(self, batch: TokenBatch, sum_over_ranks: SumOverRanks = only_rank) -> Sums:
        """Fill in ``batch.advantages``, ``batch.returns`` and what the policy loss selects. Collective.

        Raises:
            SampleError: an advantage that is no finite number.
        """
        rewards, token_rewards, metrics = batch.rewards, where_earned(batch), {}
        if self.reward_kl is not None:
            penalty, metrics = self.reward_kl.penalty(batch, sum_over_ranks)
            rewards, token_rewards = rewards - penalty.sum(1), token_rewards - penalty
        found = self.estimator(replace(batch, rewards=rewards, token_rewards=token_rewards), self.settings)
        advantages = NORMALIZATIONS[self.needs.normalize](found.advantages, batch, sum_over_ranks)
        batch.advantages, batch.returns = masked(advantages, batch.mask), found.returns
        require_finite(self.settings.adv_estimator, batch)
        if self.actor.policy_loss in SELECTIONS:
            batch.selected = SELECTIONS[self.actor.policy_loss](batch, self.actor, sum_over_ranks)
        return metrics | advantage_metrics(batch.advantages, batch.mask, sum_over_ranks)

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on beside the config."""
        return {} if self.reward_kl is None else {"kl_ctrl": self.reward_kl.controller.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue; a penalty that the saved run did not have starts with the config's weight."""
        if self.reward_kl is not None and "kl_ctrl" in state:
            self.reward_kl.controller.load_state_dict(state["kl_ctrl"])


def require_finite(estimator: str, batch: TokenBatch) -> None:
    bad = (~batch.advantages.isfinite()).any(1).nonzero().flatten().tolist()
    if bad:
        row = bad[0]
        raise SampleError(
            f"{estimator} gave {len(bad)} response(s) an advantage that is no finite number; the first has the reward "
            f"{batch.rewards[row].item():g}, {int(batch.mask[row].sum())} tokens and group {int(batch.group_ids[row])}"
        )


def advantage_metrics(advantages: PerToken, mask: PerToken, sum_over_ranks: SumOverRanks) -> Sums:
    """Over the chosen tokens: the mean and deviation of all ranks, this rank's smallest and largest."""
    mean, variance, _ = moments(advantages, mask, sum_over_ranks)
    chosen = advantages[mask > 0]
    metrics = {"algorithm/advantage_mean": (mean.item(), 1.0), "algorithm/advantage_std": (variance.sqrt().item(), 1.0)}
    if len(chosen):
        metrics["algorithm/advantage_min"] = (chosen.min().item(), 1.0)
        metrics["algorithm/advantage_max"] = (chosen.max().item(), 1.0)
    return metrics


def make_algorithm(config: RunConfig) -> Algorithm:
    """
    Raises:
        ConfigError: a function of one's own that is not there, breaks the contract or needs what there is not.
    """
    actor, settings = config.actor_rollout_ref.actor, config.algorithm
    estimator, needs = checked_estimator(config)
    checked_policy_loss(actor)
    return Algorithm(
        estimator=estimator,
        settings=settings,
        actor=actor,
        policy_loss=make_policy_loss(actor, settings.rollout_correction),
        needs=needs,
        needs_old_logprobs=config.needs_old_logprobs,
        needs_reference=config.needs_reference,
        reward_kl=RewardKl(settings) if settings.use_kl_in_reward else None,
        value_loss=make_value_loss(config.critic) if config.critic.enable else None,
    )
