import json
import math

import pytest
import torch

from rlhf_mp.algorithms.normalize import only_rank
from rlhf_mp.algorithms.reward_kl import KlController, RewardKl
from rlhf_mp.config.algorithm import AlgorithmConfig, KlControlConfig


def test_adaptive_control_by_hand():
    controller = KlController(KlControlConfig("adaptive", kl_coef=0.2, horizon=100, target_kl=0.1), 0.2)
    controller.update(0.11, 50)  # 10 % above the target: 1 + 0.1 * 50 / 100
    assert controller.coef == pytest.approx(0.2 * 1.05)
    controller.update(5.0, 50)  # an error counts as 20 % at most
    assert controller.coef == pytest.approx(0.2 * 1.05 * 1.1)
    controller.update(0.0, 50)
    assert controller.coef == pytest.approx(0.2 * 1.05 * 1.1 * 0.9)


def test_fixed_control_stays_and_is_the_configs_after_a_resume():
    controller = KlController(KlControlConfig("fixed", kl_coef=0.2), 0.2)
    controller.update(5.0, 1000)
    controller.load_state_dict({"coef": 0.7})
    assert controller.coef == 0.2


def test_an_adaptive_weight_survives_a_checkpoint_to_the_last_digit():
    settings = KlControlConfig("adaptive", kl_coef=0.1, horizon=10)
    one, other = KlController(settings, 0.1), KlController(settings, 0.1)
    for kl in (0.3, 0.05, 0.123):
        one.update(kl, 7)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert other.coef == one.coef != 0.1
    for controller in (one, other):
        controller.update(0.21, 7)
    assert one.coef == other.coef


def test_the_penalty_is_the_divergence_of_chosen_tokens_times_the_weight(batch_of):
    log2 = math.log(2)
    batch = batch_of(
        torch.tensor([1.0, 1.0]),
        [0, 0],
        [[0, 1, 1], [0, 0, 1]],
        old_logprobs=torch.tensor([[5.0, -1.0, -1.0], [5.0, 5.0, -1.0]]),
        ref_logprobs=torch.tensor([[0.0, -1 - log2, -1 + log2], [0.0, 0.0, -1 - log2]]),
    )
    settings = AlgorithmConfig(
        kl_penalty="k1", kl_ctrl=KlControlConfig("adaptive", kl_coef=0.5, horizon=4, target_kl=1.0)
    )
    kl = RewardKl(settings)
    penalty, metrics = kl.penalty(batch, only_rank)
    torch.testing.assert_close(penalty, 0.5 * torch.tensor([[0, log2, -log2], [0, 0, log2]]))
    assert metrics["algorithm/kl_in_reward"] == (pytest.approx(log2 / 3), 1)
    assert metrics["algorithm/kl_coef"] == (0.5, 1)  # the one this step used
    assert kl.controller.coef == pytest.approx(0.5 * (1 - 0.2 * 2 / 4))  # below the target, two responses
