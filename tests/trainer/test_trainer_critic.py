"""The loop with a critic: what it is asked, when, and what it learns from."""

from dataclasses import replace

import pytest
import torch
from loop_parts import CRITIC, SHARE, Critic, token_times, trainer

from rlhf_mp.algorithms.advantages import Estimate
from rlhf_mp.trainer.trainer import Trainer


def with_critic(num_steps: int, events: list, **changed) -> Trainer:
    made = trainer(num_steps, events, critic=Critic(events), **changed)
    made.rollouts.share = replace(SHARE, critic=CRITIC)
    with_returns = lambda batch, _: Estimate(batch.rewards[:, None] * batch.mask, batch.values + batch.rewards[:, None])  # noqa: E731
    made.algorithm = replace(made.algorithm, estimator=with_returns, value_loss=lambda output, batch, totals: None)
    return made


def test_a_critic_is_scored_before_and_updated_in_its_own_mini_batches():
    events = []
    made = with_critic(1, events)
    made.train()
    assert events[2:8] == [
        ("fetch", 0), ("score", "critic"), ("train critic", 12), ("train critic", 12), ("train", 12), ("train", 6),
    ]  # fmt: skip
    (first, loss_fn), (second, _) = made.critic.batches
    assert loss_fn is made.algorithm.value_loss
    assert [batch.tokens.tolist() for batch in first] == [[[7, 2, 1]], [[7, 3, 3, 3, 3]]]
    for batch in (*first, *second):
        torch.testing.assert_close(batch.values, token_times(0.03, batch))
        torch.testing.assert_close(batch.returns, (batch.values + batch.rewards[:, None]))


def test_the_critic_has_metrics_of_its_own():
    made = with_critic(1, [])
    made.train()
    ((_, metrics), _) = made.log.sinks[0].written
    # the mean of values 0.03 * token over tokens 2 1, 3 3 3 3, 4 1, 5
    assert metrics["critic/value_mean"] == pytest.approx(0.03 * 25 / 9)
    assert {"critic/grad_norm", "critic/return_std", "critic/explained_variance", "actor/grad_norm"} <= metrics.keys()


def test_in_the_warm_up_only_the_critic_learns_and_no_swap_must_bring_other_weights():
    events = []
    made = with_critic(3, events, critic_warmup=2)
    made.train()
    trained = [event[0] for event in events if event[0].startswith("train") or event[0] == "live"]
    assert trained == [
        "live",
        *["train critic", "train critic", "live"] * 2,
        *["train critic"] * 2,
        "train",
        "train",
        "live",
    ]
    assert made.swap.must_differ == [False, False, False, True]
