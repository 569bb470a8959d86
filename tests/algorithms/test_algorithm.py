"""Rewards in, advantages out: KL penalty, estimator, normalisation and selection together."""

import math
from dataclasses import replace

import pytest
import torch
from test_normalize import shares_of
from threads_as_ranks import on_ranks

from rlhf_mp.algorithms.base import make_algorithm
from rlhf_mp.algorithms.normalize import only_rank
from rlhf_mp.algorithms.registered import advantage_estimators
from rlhf_mp.config.algorithm import ESTIMATORS
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.errors import SampleError


def algorithm(estimator="grpo", **settings):
    config = RunConfig()
    config.algorithm = replace(config.algorithm, adv_estimator=estimator, **settings)
    return make_algorithm(config)


@pytest.mark.parametrize("name", [*advantage_estimators])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_number_of_ranks_changes_no_advantage_return_or_metric(random_batch, name, num_ranks):
    batch = random_batch(num_ranks)
    rows, shares = shares_of(batch, num_ranks)

    def estimated(share, total):
        made = algorithm(name, use_kl_in_reward=True, gamma=0.9)
        return made.estimate(share, total), share, made.state_dict()

    whole_metrics, whole, whole_state = estimated(batch, only_rank)
    for own, (metrics, part, state) in zip(rows, on_ranks(estimated, shares), strict=True):
        torch.testing.assert_close(part.advantages, whole.advantages[own], atol=1e-13, rtol=1e-13)
        if whole.returns is not None:
            torch.testing.assert_close(part.returns, whole.returns[own])
        for metric in ("algorithm/advantage_mean", "algorithm/advantage_std", "algorithm/kl_in_reward"):
            assert metrics[metric] == pytest.approx(whole_metrics[metric], abs=1e-12)
        assert state == whole_state


@pytest.mark.parametrize("name", [*advantage_estimators])
def test_equal_rewards_an_empty_response_and_no_token_at_all_give_numbers(batch_of, name):
    for mask in ([[0, 1, 1], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]]):
        zeros = torch.zeros(2, 3)
        batch = batch_of([0.1, 0.1], [4, 4], mask, values=zeros, baselines=torch.tensor([0.1, 0.1]))
        metrics = algorithm(name).estimate(batch)
        assert batch.advantages.isfinite().all()
        assert all(math.isfinite(total) for total, _ in metrics.values())
        if ESTIMATORS[name].min_responses > 1:
            assert not batch.advantages.any()


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_an_advantage_that_is_no_number_is_an_error(batch_of, reward):
    batch = batch_of([reward, 0.0], [4, 4], [[0, 1], [0, 1]])
    with pytest.raises(SampleError, match="grpo gave .* no finite number.*group 4"):
        algorithm().estimate(batch)


def test_what_a_turn_was_paid_is_credited_to_what_came_before_it(batch_of):
    paid = torch.tensor([[0.0, 0.5, 0, 0], [0, 0, 9, 0]])  # of a token that was not chosen: nobody's
    batch = batch_of([2.0, 1.0], [0, 0], [[0, 1, 0, 1], [0, 1, 0, 1]], paid=paid)
    algorithm("reinforce").estimate(batch)
    torch.testing.assert_close(batch.advantages, torch.tensor([[0, 2.0, 0, 1.5], [0, 1.0, 0, 1.0]]))
    algorithm("dr_grpo").estimate(batch)  # whole responses
    torch.testing.assert_close(batch.advantages, torch.tensor([[0, 0.5, 0, 0.5], [0, -0.5, 0, -0.5]]))


def test_a_kl_penalty_lowers_each_tokens_reward_and_the_responses(batch_of):
    log2 = math.log(2)
    batch = batch_of(
        [1.0, 0.0],
        [0, 0],
        [[0, 1, 1], [0, 1, 0]],
        old_logprobs=torch.tensor([[0.0, -1, -1], [0, -1, 0]]),
        ref_logprobs=torch.tensor([[0.0, -1 - log2, -1], [0, -1, 0]]),
    )
    seen = replace(batch)
    made = algorithm("dr_grpo", use_kl_in_reward=True)
    metrics = made.estimate(seen)
    first = 1 - 0.001 * log2  # the first response's reward less its penalty; the mean is half of it
    torch.testing.assert_close(seen.advantages, torch.tensor([[0, first / 2, first / 2], [0, -first / 2, 0]]))
    assert metrics["algorithm/kl_in_reward"][0] == pytest.approx(log2 / 3)
    assert seen.rewards.tolist() == [1.0, 0.0]  # what was earned stays what it was

    seen = replace(batch)
    algorithm("reinforce", use_kl_in_reward=True).estimate(seen)
    torch.testing.assert_close(seen.advantages, torch.tensor([[0, first, 1.0], [0, 0, 0]]))


def test_what_is_scored_follows_from_what_is_used():
    def scored(config):
        made = make_algorithm(config)
        return made.needs_old_logprobs, made.needs_reference

    single = RunConfig()
    single.actor_rollout_ref.actor.ppo_mini_batch_size = single.data.train_batch_size
    assert scored(single) == (False, False)
    assert scored(RunConfig()) == (True, False)  # several updates
    single.actor_rollout_ref.actor.use_kl_loss = True
    assert scored(single) == (False, True)
    single.actor_rollout_ref.actor.use_kl_loss = False
    single.algorithm.use_kl_in_reward = True
    assert scored(single) == (True, True)
    single.algorithm.use_kl_in_reward = False
    single.actor_rollout_ref.actor.policy_loss = "clip_cov"
    assert scored(single) == (True, False)


def test_statistics_of_advantages_by_hand(batch_of):
    batch = batch_of([1.0, 0.0, 0.0, 0.0], [0, 0, 1, 1], [[0, 1, 1], [0, 1, 0], [0, 0, 0], [0, 1, 0]])
    metrics = algorithm("dr_grpo").estimate(batch)
    # 1/2, 1/2, -1/2, 0: mean 1/8, sample variance (2 * 9/64 + 25/64 + 1/64) / 3
    assert metrics["algorithm/advantage_mean"][0] == pytest.approx(1 / 8)
    assert metrics["algorithm/advantage_std"][0] == pytest.approx((44 / 64 / 3) ** 0.5)
    assert metrics["algorithm/advantage_min"] == (-0.5, 1) and metrics["algorithm/advantage_max"] == (0.5, 1)
