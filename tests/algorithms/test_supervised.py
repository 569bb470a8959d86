"""Losses of examples: numbers by hand, the definitions written out, and independence of the cut."""

import math
from collections import Counter

import pytest
import torch

from rlhf_mp.algorithms.supervised import (
    bradley_terry_loss,
    dpo_loss,
    fine_tuning_loss,
    ipo_loss,
    make_task,
    pairs,
    preference_losses,
    sigmoid_loss,
)
from rlhf_mp.config.dpo import DpoConfig
from rlhf_mp.config.load import config_from_dict
from rlhf_mp.data.collate import collate
from rlhf_mp.data.types import PolicyOutput, RewardOutput, Totals, Trajectory


def batch_of(rows, margins=None):
    """Sequences of a prompt token and ``rows[i]`` response tokens."""
    margins = margins or [0.0] * len(rows)
    made = [
        Trajectory([3], [2] * n, [0.0] * n, [True] * n, margin, i // 2, 0, "stop")
        for i, (n, margin) in enumerate(zip(rows, margins, strict=True))
    ]
    return collate(made)


def policy(logprobs):
    return PolicyOutput(logprobs, torch.zeros_like(logprobs))


def numbers(metrics):
    return {name: float(total) / float(count) for name, (total, count) in metrics.items()}


def test_fine_tuning_by_hand():
    # tokens with log-probs -1, -2 and -6, one of them in a row of its own: (1 + 2 + 6) / 3
    batch = batch_of([2, 1])
    logprobs = torch.tensor([[9.0, -1.0, -2.0], [9.0, -6.0, 9.0]], requires_grad=True)
    loss, metrics = fine_tuning_loss("token-mean")(policy(logprobs), batch, Totals(3, 2))
    assert loss.item() == pytest.approx(3.0)
    assert numbers(metrics) == pytest.approx({"loss": 3.0})
    loss.backward()
    assert logprobs.grad.tolist() == [[0, pytest.approx(-1 / 3), pytest.approx(-1 / 3)], [0, pytest.approx(-1 / 3), 0]]
    # every row the same: (1.5 + 6) / 2
    assert fine_tuning_loss("seq-mean-token-mean")(policy(logprobs), batch, Totals(3, 2))[0].item() == pytest.approx(
        3.75
    )


def test_dpo_by_hand():
    # chosen: policy -1, reference -2; rejected: policy -3, reference -2 -> difference (1) - (-1) = 2
    batch = batch_of([1, 1])
    batch.ref_logprobs = torch.tensor([[0.0, -2.0], [0.0, -2.0]])
    logprobs = torch.tensor([[0.0, -1.0], [0.0, -3.0]], requires_grad=True)
    loss, metrics = dpo_loss(DpoConfig(beta=0.5))(policy(logprobs), batch, Totals(2, 2))
    # -log sigmoid(0.5 * 2) = log(1 + 1/e) = 0.313262
    assert loss.item() == pytest.approx(0.313262, abs=1e-6)
    assert numbers(metrics) == pytest.approx(
        {"loss": 0.313262, "accuracy": 1.0, "chosen_reward": 0.5, "rejected_reward": -0.5}, abs=1e-6
    )
    loss.backward()
    # d/dx -log sigmoid(x) = -sigmoid(-x); sigmoid(-1) = 0.268941, times beta
    assert logprobs.grad[:, 1].tolist() == pytest.approx([-0.134471, 0.134471], abs=1e-6)


def test_a_smoothed_label_is_wrong_so_often_and_ipo_wants_a_certain_distance():
    difference = torch.tensor([2.0])
    # 0.9 * 0.313262 + 0.1 * -log sigmoid(-1) = 0.9 * 0.313262 + 0.1 * 1.313262
    assert sigmoid_loss(difference, DpoConfig(beta=0.5, label_smoothing=0.1)).item() == pytest.approx(
        0.413262, abs=1e-6
    )
    # (2 - 1 / (2 * 0.1))^2 = 9; at the wanted distance of 5 nothing is left
    assert ipo_loss(difference, DpoConfig(beta=0.1)).item() == pytest.approx(9.0)
    assert ipo_loss(torch.tensor([5.0]), DpoConfig(beta=0.1)).item() == 0


def test_bradley_terry_by_hand():
    # differences 1 and 0, with margins 1 and 0: -log sigmoid(0) = 0.693147 twice
    batch = batch_of([1, 1, 1, 1], margins=[1.0, 0.0, 0.0, 0.0])
    rewards = torch.tensor([3.0, 2.0, 5.0, 5.0], requires_grad=True)
    loss, metrics = bradley_terry_loss(RewardOutput(rewards), batch, Totals(4, 4))
    assert loss.item() == pytest.approx(math.log(2))
    assert numbers(metrics) == pytest.approx(
        {"loss": math.log(2), "accuracy": 0.75, "chosen_reward": 4.0, "rejected_reward": 3.5}
    )
    loss.backward()
    assert rewards.grad.tolist() == [-0.25, 0.25, -0.25, 0.25]


def naive_dpo(own, reference, masks, beta):
    """Pair after pair, token after token, in plain Python."""
    losses = []
    for chosen, rejected in zip(range(0, len(own), 2), range(1, len(own), 2), strict=True):
        ratio = [
            sum(own[r][t] - reference[r][t] for t in range(len(own[r])) if masks[r][t]) for r in (chosen, rejected)
        ]
        losses.append(math.log1p(math.exp(-beta * (ratio[0] - ratio[1]))))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("seed", range(5))
def test_dpo_is_its_definition_written_out(seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(1, 7, (8,), generator=generator).tolist()
    batch = batch_of(rows)
    batch.ref_logprobs = -torch.rand(batch.mask.shape, generator=generator) * 3
    own = -torch.rand(batch.mask.shape, generator=generator) * 3
    loss, _ = dpo_loss(DpoConfig(beta=0.3))(policy(own), batch, Totals(int(batch.mask.sum()), 8))
    expected = naive_dpo(own.tolist(), batch.ref_logprobs.tolist(), batch.mask.tolist(), 0.3)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def outputs(task, x, rows):
    return RewardOutput(x[rows, 0]) if task == "reward_model" else policy(x[rows])


@pytest.mark.parametrize("cut", [[[0, 1, 2, 3, 4, 5]], [[0, 1], [2, 3], [4, 5]], [[4, 5, 0, 1], [], [2, 3]]])
@pytest.mark.parametrize("task", ["sft", "dpo", "reward_model"])
def test_loss_metrics_and_gradient_do_not_depend_on_the_cut(task, cut):
    torch.manual_seed(3)
    whole = batch_of([2, 5, 1, 3, 4, 4], margins=[0.5, 0, 0.1, 0, 0, 0])
    whole.ref_logprobs = -torch.rand(whole.mask.shape)
    loss_fn = make_task(config_from_dict({"trainer": {"task": task}})).loss
    totals = Totals(int(whole.mask.sum()), 6)

    def run(cut):
        x = torch.linspace(-2, -0.1, whole.mask.numel()).view(whole.mask.shape).requires_grad_()
        found, sums = 0.0, Counter()
        for rows in cut:
            batch = whole.select(rows)
            loss, metrics = loss_fn(outputs(task, x[:, : batch.tokens.shape[1]], rows or [0]), batch, totals)
            loss.backward()
            found += loss.item()
            for name, (total, count) in metrics.items():
                sums[name] += float(total)
                sums[f"{name} count"] += float(count)
        return found, dict(sums), x.grad

    expected, found = run([[0, 1, 2, 3, 4, 5]]), run(cut)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1] == pytest.approx(expected[1], rel=1e-5)
    torch.testing.assert_close(found[2], expected[2])


@pytest.mark.parametrize("task", ["sft", "dpo", "reward_model"])
def test_an_empty_micro_batch_adds_nothing_but_has_a_gradient_to_send_back(task):
    whole = batch_of([2, 5])
    whole.ref_logprobs = torch.zeros_like(whole.mask)
    loss_fn = make_task(config_from_dict({"trainer": {"task": task}})).loss
    x = torch.full((1, 2), -1.0, requires_grad=True)
    loss, metrics = loss_fn(outputs(task, x, [0]), whole.select([]), Totals(7, 2))
    loss.backward()
    assert loss.item() == 0 and x.grad.abs().sum() == 0
    assert all(float(total) == float(count) == 0 for total, count in metrics.values())


def test_pairs_are_neighbours_and_half_a_pair_is_none():
    chosen, rejected = pairs(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert (chosen.tolist(), rejected.tolist()) == ([1.0, 3.0], [2.0, 4.0])
    assert [len(x) for x in pairs(torch.tensor([1.0]))] == [0, 0]


def test_the_config_chooses_the_loss():
    assert [*preference_losses] == ["ipo", "sigmoid"]
    config = config_from_dict({"trainer": {"task": "dpo"}, "dpo": {"loss_type": "ipo", "beta": 0.1}})
    task = make_task(config)
    assert task.needs_reference
    batch = batch_of([1, 1])
    batch.ref_logprobs = torch.zeros(2, 2)
    loss, _ = task.loss(policy(torch.tensor([[0.0, 1.0], [0.0, -1.0]])), batch, Totals(2, 2))
    assert loss.item() == pytest.approx(9.0)  # (2 - 5)^2
    with pytest.raises(ValueError, match="samples"):
        make_task(config_from_dict({}))
