import pytest
import torch

from rlhf_mp.algorithms.registered import advantage_estimators
from rlhf_mp.algorithms.token_advantages import on_last_token
from rlhf_mp.config.algorithm import AlgorithmConfig


def test_a_reward_is_earned_at_the_last_chosen_token_and_by_none_of_an_empty_response():
    mask = torch.tensor([[0.0, 1, 1, 0], [0, 1, 0, 1], [0, 0, 0, 0]])
    placed = on_last_token(torch.tensor([2.0, 3.0, float("inf")]), mask)
    assert placed.tolist() == [[0, 0, 2, 0], [0, 0, 0, 3], [0, 0, 0, 0]]


def test_gae_by_hand(batch_of):
    batch = batch_of(
        torch.tensor([1.0]).double(),
        [0],
        [[0, 1, 0, 1, 0]],
        values=torch.tensor([[9.0, 0.5, 9.0, 0.25, 9.0]]).double(),
        token_rewards=torch.tensor([[0.0, -0.1, 0.0, 1.0, 0.0]]).double(),
    )
    found = advantage_estimators["gae"](batch, AlgorithmConfig(gamma=0.9, lam=0.8))
    # the last: 1 - 0.25 = 0.75; the first: -0.1 + 0.9 * 0.25 - 0.5 = -0.375, + 0.72 * 0.75 = 0.165
    # what was put in between by a tool takes no time
    torch.testing.assert_close(found.advantages, torch.tensor([[0, 0.165, 0, 0.75, 0]]).double())
    torch.testing.assert_close(found.returns, torch.tensor([[0, 0.665, 0, 1.0, 0]]).double())


def naive_gae(rewards, values, gamma, lam):
    """The sum of the definition, for the chosen tokens of one response."""
    after = [*values, 0.0][1:]
    errors = [r + gamma * later - v for r, v, later in zip(rewards, values, after, strict=True)]
    return [sum((gamma * lam) ** k * error for k, error in enumerate(errors[t:])) for t in range(len(errors))]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("seed", range(3))
def test_gae_agrees_with_the_definition_whatever_is_between_chosen_tokens(random_batch, seed, gamma, lam):
    batch = random_batch(seed)
    batch.token_rewards = batch.token_rewards - 0.1 * batch.mask
    found = advantage_estimators["gae"](batch, AlgorithmConfig(gamma=gamma, lam=lam))
    for row in range(len(batch.mask)):
        chosen = batch.mask[row] > 0
        expected = naive_gae(batch.token_rewards[row][chosen].tolist(), batch.values[row][chosen].tolist(), gamma, lam)
        assert found.advantages[row][chosen].tolist() == pytest.approx(expected)
    torch.testing.assert_close(found.returns, found.advantages + batch.values)
    assert not found.advantages[batch.mask == 0].any()


def test_with_gamma_and_lambda_1_gae_is_the_reward_to_go_less_the_value(random_batch):
    batch = random_batch(5)
    gae = advantage_estimators["gae"](batch, AlgorithmConfig()).advantages
    reinforce = advantage_estimators["reinforce"](batch, AlgorithmConfig()).advantages
    torch.testing.assert_close(gae, reinforce - batch.values)


def test_reinforce_discounts_by_the_chosen_tokens_still_to_come(batch_of):
    batch = batch_of([2.0], [0], [[0, 1, 0, 1, 1]])
    for name in ("reinforce", "reinforce_plus_plus"):  # whitening comes later
        found = advantage_estimators[name](batch, AlgorithmConfig(gamma=0.5)).advantages
        assert found.tolist() == [[0, 0.5, 0, 1.0, 2.0]]


def test_remax_compares_with_the_greedy_response(batch_of):
    batch = batch_of([1.0, 0.0], [0, 0], [[0, 1, 1], [0, 1, 0]], baselines=torch.tensor([0.25, 0.25]))
    found = advantage_estimators["remax"](batch, AlgorithmConfig()).advantages
    assert found.tolist() == [[0, 0.75, 0.75], [0, -0.25, 0]]


@pytest.mark.parametrize(("name", "field"), [("gae", "values"), ("remax", "baselines")])
def test_what_is_missing_is_named(batch_of, name, field):
    with pytest.raises(ValueError, match=f"{name} needs batch.{field}"):
        advantage_estimators[name](batch_of([1.0], [0], [[0, 1]]), AlgorithmConfig())
