"""The divergence from the reference model as a part of the reward, and how much it weighs."""

from dataclasses import dataclass
from typing import Any

import torch

from rlhf_mp.algorithms.kl import kl_estimators
from rlhf_mp.algorithms.masked import PerToken, masked
from rlhf_mp.algorithms.normalize import SumOverRanks
from rlhf_mp.config.algorithm import AlgorithmConfig, KlControlConfig
from rlhf_mp.data.types import Sums, TokenBatch

MAX_ERROR = 0.2  # of one correction


@dataclass
class KlController:
    """The penalty's weight. Adaptive: larger while the divergence is above its target, smaller below.

    Source: arXiv:1909.08593 sec. 2.2, with K_beta = responses / horizon as in its authors' code; the divergence is per
    token here.
    """

    settings: KlControlConfig
    coef: float

    def update(self, mean_kl: float, num_responses: int) -> None:
        if self.settings.type == "adaptive":
            error = min(max(mean_kl / self.settings.target_kl - 1, -MAX_ERROR), MAX_ERROR)
            self.coef *= 1 + error * num_responses / self.settings.horizon

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A fixed weight is the config's, whatever it was."""
        if self.settings.type == "adaptive":
            self.coef = state["coef"]


class RewardKl:
    """Penalties of one run's steps."""

    def __init__(self, settings: AlgorithmConfig):
        self.estimate = kl_estimators[settings.kl_penalty]
        self.controller = KlController(settings.kl_ctrl, settings.kl_ctrl.kl_coef)

    def penalty(self, batch: TokenBatch, sum_over_ranks: SumOverRanks) -> tuple[PerToken, Sums]:
        """What each token's reward is lowered by in this step, and metrics. Then the weight follows what was seen."""
        kl = masked(self.estimate(batch.old_logprobs, batch.ref_logprobs), batch.mask)
        coef = self.controller.coef
        ours = torch.stack([kl.double().sum(), batch.mask.double().sum()])
        responses = ours.new_tensor([len(batch.rewards)])
        total, num_tokens, num_responses = sum_over_ranks(torch.cat([ours, responses])).tolist()
        mean_kl = total / max(num_tokens, 1)
        self.controller.update(mean_kl, int(num_responses))
        return coef * kl, {"algorithm/kl_in_reward": (mean_kl, 1.0), "algorithm/kl_coef": (coef, 1.0)}
