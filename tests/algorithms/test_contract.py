"""Functions of one's own: found, tried before anything starts, and told what is wrong with them."""

import pytest
import torch

from rlhf_mp.algorithms.advantages import Estimate
from rlhf_mp.algorithms.base import make_algorithm
from rlhf_mp.algorithms.contract import tiny_batch
from rlhf_mp.algorithms.policy_loss import PolicyTerms
from rlhf_mp.algorithms.registered import advantage_estimators, policy_losses
from rlhf_mp.config.algorithm import Needs
from rlhf_mp.config.derive import derive
from rlhf_mp.config.schema import ActorConfig, RunConfig
from rlhf_mp.errors import ConfigError

HERE = "test_contract"


def spread(batch, settings):
    return Estimate((batch.rewards - batch.rewards.mean())[:, None] * batch.mask)


def comparing(batch, settings):
    return spread(batch, settings)


comparing.needs = Needs(min_responses=9)


def careless(batch, settings):
    return spread(batch, settings)


careless.needs = {"critic": True}


def without_settings(batch):
    return spread(batch, None)


def of_responses(batch, settings):
    return Estimate(batch.rewards[:, None])


def bare_tensor(batch, settings):
    return batch.mask


def dividing(batch, settings):
    return Estimate(batch.rewards[:, None] / (batch.rewards - 0.5)[:, None] * batch.mask)


def failing(batch, settings):
    raise RuntimeError("no such thing")


def plain(logprobs, batch, actor):
    return PolicyTerms(-logprobs * batch.advantages, {"surprise": -logprobs.detach()})


def detached(logprobs, batch, actor):
    return PolicyTerms(-logprobs.detach() * batch.advantages)


def summed(logprobs, batch, actor):
    return PolicyTerms((-logprobs * batch.advantages).sum(1, keepdim=True))


def config(estimator="grpo", loss="ppo_clip"):
    made = RunConfig()
    made.algorithm.adv_estimator, made.actor_rollout_ref.actor.policy_loss = estimator, loss
    derive(made)
    return made


def test_ones_own_estimator_and_loss_are_used():
    made = make_algorithm(config(f"{HERE}:spread", f"{HERE}:plain"))
    batch = tiny_batch()
    made.estimate(batch)
    torch.testing.assert_close(batch.advantages, spread(tiny_batch(), None).advantages)


@pytest.mark.parametrize(
    ("estimator", "reason"),
    [
        ("spread_out_nowhere:f", "cannot import spread_out_nowhere"),
        (f"{HERE}:sprad", "has no function sprad"),
        (f"{HERE}:without_settings", "called with 2 arguments"),
        (f"{HERE}:of_responses", r"advantages is \(4, 1\), not a float tensor of the mask's shape"),
        (f"{HERE}:bare_tensor", "returns Tensor, not Estimate"),
        (f"{HERE}:dividing", "advantages is not finite"),
        (f"{HERE}:failing", "raises RuntimeError: no such thing"),
        (f"{HERE}:careless", "attribute needs is"),
        (f"{HERE}:comparing", "compares the responses to one prompt"),
    ],
)
def test_an_estimator_that_cannot_work_is_a_config_problem(estimator, reason):
    with pytest.raises(ConfigError, match=reason) as error:
        make_algorithm(config(estimator))
    assert all(problem.fix for problem in error.value.problems)


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (f"{HERE}:detached", "no gradient"),
        (f"{HERE}:summed", r"loss is \(4, 1\), not a float tensor"),
        (f"{HERE}:spread", "called with 3 arguments"),
    ],
)
def test_a_loss_that_cannot_work_is_a_config_problem(loss, reason):
    with pytest.raises(ConfigError, match=reason) as error:
        make_algorithm(config(loss=loss))
    assert [problem.key for problem in error.value.problems] == ["actor_rollout_ref.actor.policy_loss"]


@pytest.mark.parametrize("name", [*advantage_estimators])
def test_every_registered_estimator_keeps_the_contract(name):
    batch = tiny_batch()
    found = advantage_estimators[name](batch, RunConfig().algorithm)
    assert found.advantages.shape == batch.mask.shape and found.advantages.isfinite().all()


@pytest.mark.parametrize("name", [*policy_losses])
def test_every_registered_loss_keeps_the_contract(name):
    batch = tiny_batch()
    logprobs = (batch.old_logprobs * 1.02).requires_grad_()
    actor = ActorConfig(policy_loss=name, clip_ratio_low=0.2, clip_ratio_high=0.2)
    terms = policy_losses[name](logprobs, batch, actor)
    assert terms.loss.shape == batch.mask.shape and terms.loss.requires_grad
    assert all(x.shape == batch.mask.shape for x in terms.metrics.values())


def test_the_example_keeps_the_contract():
    own = "examples.own_algorithm"
    made = make_algorithm(config(f"{own}:above_median", f"{own}:positive_only"))
    assert made.needs == Needs(min_responses=2, normalize="whiten")


def test_gae_is_trained_with_a_critic_whose_loss_comes_with_it():
    made = config("gae")
    assert make_algorithm(made).value_loss is not None and make_algorithm(made).needs_critic
    assert make_algorithm(config()).value_loss is None
