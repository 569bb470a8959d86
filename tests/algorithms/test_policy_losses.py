"""Each policy loss by hand and against a loop over its paper's formula; what must hold for all of them."""

import math

import pytest
import torch

from rlhf_mp.algorithms.covariance_losses import SELECTIONS
from rlhf_mp.algorithms.losses import make_policy_loss
from rlhf_mp.algorithms.normalize import only_rank
from rlhf_mp.algorithms.registered import policy_losses
from rlhf_mp.config.algorithm import SEQUENCE_LEVEL
from rlhf_mp.config.schema import ActorConfig
from rlhf_mp.data.types import PolicyOutput, Totals

NAMES = [*policy_losses]


def actor(name="ppo_clip", **changes):
    aggregation = "seq-mean-token-mean" if name in SEQUENCE_LEVEL else "token-mean"
    known = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "loss_agg_mode": aggregation, "kl_cov_ratio": 0.2}
    return ActorConfig(policy_loss=name, **known | {"clip_cov_lb": 0.0, "clip_cov_ratio": 0.2} | changes)


def by_hand(name, batch_of, ratios, advantages, **changes):
    """(loss, gradient of the log-probs, metrics) of one response whose tokens are all chosen."""
    ratios, advantages = torch.tensor([ratios]).double(), torch.tensor([advantages]).double()
    batch = batch_of(torch.ones(1).double(), [0], torch.ones_like(ratios), old_logprobs=torch.zeros_like(ratios) - 1)
    batch.advantages, batch.selected = advantages, torch.zeros_like(ratios)
    logprobs = (ratios.log() - 1).requires_grad_()
    terms = policy_losses[name](logprobs, batch, actor(name, **changes))
    terms.loss.sum().backward()
    return terms.loss.detach(), logprobs.grad, terms.metrics


def test_dual_clip_bounds_what_a_negative_advantage_can_cost(batch_of):
    loss, grad, metrics = by_hand("ppo_clip", batch_of, [5.0, 2.0, 5.0], [-1.0, -1.0, 1.0], clip_ratio_c=3.0)
    torch.testing.assert_close(loss, torch.tensor([[3.0, 2.0, -1.3]]).double())
    torch.testing.assert_close(grad, torch.tensor([[0.0, 2.0, 0.0]]).double())
    assert metrics["clip_fraction_dual"].tolist() == [[1.0, 0.0, 0.0]]


def test_policy_gradient_is_minus_advantage_times_logprob(batch_of):
    loss, grad, _ = by_hand("policy_gradient", batch_of, [1.0, math.e], [2.0, -3.0])
    torch.testing.assert_close(loss, torch.tensor([[2.0, 0.0]]).double(), atol=1e-6, rtol=0)  # log p = -1, 0
    assert grad.tolist() == [[-2.0, 3.0]]


def test_cispo_cuts_the_weight_but_keeps_the_gradient(batch_of):
    _, grad, metrics = by_hand("cispo", batch_of, [2.0, 0.5, 1.1], [1.0, 1.0, -2.0])
    torch.testing.assert_close(grad, torch.tensor([[-1.3, -0.8, 2.2]]).double())
    assert metrics["clip_fraction_high"].tolist() == [[1.0, 0.0, 0.0]]
    assert metrics["clip_fraction_low"].tolist() == [[0.0, 1.0, 0.0]]


def test_sapo_by_hand(batch_of):
    loss, grad, _ = by_hand("sapo", batch_of, [1.0, 2.0, 2.0], [1.0, 1.0, -1.0], tau_pos=2.0, tau_neg=3.0)
    # at ratio 1: sigmoid(0) * 4 / 2 = 1, slope 1; then sigmoid(2) * 2 and sigmoid(3) * 4 / 3
    p, n = 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(-3))
    torch.testing.assert_close(loss, torch.tensor([[-1, -p * 2, n * 4 / 3]]).double())
    # d/dlogp = -A * 4 sigmoid (1 - sigmoid) * ratio
    torch.testing.assert_close(grad, torch.tensor([[-1, -4 * p * (1 - p) * 2, 4 * n * (1 - n) * 2]]).double())


def test_gspo_clips_by_the_geometric_mean_of_the_ratios(batch_of):
    loss, grad, metrics = by_hand("gspo", batch_of, [2.0, 0.5], [1.0, 1.0])  # (2 * 0.5)^(1/2) = 1
    torch.testing.assert_close(loss, torch.tensor([[-1.0, -1.0]]).double())  # not to the bit: processors differ in exp
    torch.testing.assert_close(grad, torch.tensor([[-1.0, -1.0]]).double())
    loss, grad, metrics = by_hand("gspo", batch_of, [4.0, 1.0], [1.0, -1.0])  # 2
    torch.testing.assert_close(loss, torch.tensor([[-1.3, 2.0]]).double())
    torch.testing.assert_close(grad, torch.tensor([[0.0, 2.0]]).double())
    assert metrics["clip_fraction_high"].tolist() == [[1.0, 0.0]]


def test_gmpo_clips_each_ratio_and_takes_their_geometric_mean(batch_of):
    wide = {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}
    loss, grad, metrics = by_hand("gmpo", batch_of, [math.exp(0.9), math.exp(-0.6)], [2.0, 2.0], **wide)
    # for a positive advantage only what is too high is clipped: (0.4 - 0.6) / 2 = -0.1
    value = math.exp(-0.1) * 2
    torch.testing.assert_close(loss, torch.tensor([[-value, -value]]).double())
    torch.testing.assert_close(grad, torch.tensor([[0.0, -value]]).double())  # each of two tokens carries half, twice
    assert metrics["clip_fraction_high"].tolist() == [[1.0, 0.0]]


def test_what_the_covariance_losses_selected_is_held_back_or_left_out(batch_of):
    batch = batch_of(torch.ones(1), [0], [[1, 1, 1]], old_logprobs=torch.full((1, 3), -1.0))
    batch.advantages, batch.selected = torch.tensor([[1.0, 1.0, -1.0]]), torch.tensor([[0.0, 1.0, 0.0]])
    logprobs = torch.tensor([[-0.9, -0.9, -1.1]])
    held = policy_losses["kl_cov"](logprobs, batch, actor("kl_cov", ppo_kl_coef=3.0)).loss
    r = math.exp(0.1)
    torch.testing.assert_close(held, torch.tensor([[-r, -r + 0.3, 1 / r]]))
    left_out = policy_losses["clip_cov"](logprobs, batch, actor("clip_cov")).loss
    torch.testing.assert_close(left_out, torch.tensor([[-r, 0.0, 1 / r]]))


def naive(name, row, c):
    """Loss of each chosen token of one response: (log-prob, old log-prob, advantage, selected) in turn."""
    log_ratios = [new - old for new, old, _, _ in row]
    losses = []
    for (new, _, advantage, selected), log_r in zip(row, log_ratios, strict=True):
        low, high, r = 1 - c.clip_ratio_low, 1 + c.clip_ratio_high, math.exp(log_r)
        if name == "gspo":
            r = math.exp(sum(log_ratios) / len(log_ratios))
        clipped = -min(r * advantage, min(max(r, low), high) * advantage)
        tau = c.tau_pos if advantage > 0 else c.tau_neg
        sign = 1 if advantage > 0 else -1
        bounded = [sign * min(sign * x, sign * min(max(x, -c.clip_ratio_low), c.clip_ratio_high)) for x in log_ratios]
        losses.append(
            {
                "ppo_clip": clipped,
                "gspo": clipped,
                "clip_cov": 0.0 if selected else clipped,
                "kl_cov": -r * advantage + (c.ppo_kl_coef * abs(log_r) if selected else 0.0),
                "policy_gradient": -new * advantage,
                "cispo": -min(max(r, low), high) * advantage * new,
                "sapo": -4 / tau / (1 + math.exp(-tau * (r - 1))) * advantage,
                "gmpo": -math.exp(sum(bounded) / len(bounded)) * advantage,
            }[name]
        )
    return losses


def case(random_batch, seed, name):
    batch = random_batch(seed)
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (len(batch.mask), 1), generator=generator) * 2 - 1
    batch.advantages = (
        signs * (0.5 + torch.rand(batch.mask.shape, generator=generator, dtype=torch.float64)) * batch.mask
    )
    if name in SELECTIONS:
        batch.selected = SELECTIONS[name](batch, actor(name), only_rank).double()
        assert batch.selected.any()
    logprobs = (batch.old_logprobs + 0.3 * torch.randn(batch.mask.shape, generator=generator).double()) * batch.mask
    return logprobs.requires_grad_(), batch


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_each_agrees_with_its_formula(random_batch, name, seed):
    logprobs, batch = case(random_batch, seed, name)
    found = policy_losses[name](logprobs, batch, actor(name)).loss.detach()
    selected = batch.selected if batch.selected is not None else torch.zeros_like(batch.mask)
    for row in range(len(batch.mask)):
        chosen = batch.mask[row] > 0
        tokens = torch.stack([logprobs.detach(), batch.old_logprobs, batch.advantages, selected], -1)[row][chosen]
        assert found[row][chosen].tolist() == pytest.approx(naive(name, tokens.tolist(), actor(name)), rel=1e-6)


def loss_and_gradient(name, logprobs, batch, totals):
    logprobs = logprobs.detach().clone().requires_grad_()
    output = PolicyOutput(logprobs, torch.zeros_like(logprobs))
    loss, _ = make_policy_loss(actor(name))(output, batch, totals)
    loss.backward()
    return loss.detach(), logprobs.grad


@pytest.mark.parametrize("name", NAMES)
def test_padding_and_the_cut_and_order_of_micro_batches_change_nothing(random_batch, name):
    logprobs, batch = case(random_batch, 4, name)
    totals = Totals(int(batch.mask.sum()), len(batch.mask))
    whole, gradient = loss_and_gradient(name, logprobs, batch, totals)
    parts = torch.zeros(())
    for row in reversed(range(len(batch.mask))):

        def alone(x, row=row):
            return torch.nn.functional.pad(x[[row]], (0, 2), value=0) if x.dim() == 2 else x[[row]]

        part, own = loss_and_gradient(name, alone(logprobs.detach()), batch._map(alone), totals)
        parts = parts + part
        torch.testing.assert_close(own[:, :-2], gradient[[row]])
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("name", NAMES)
def test_garbage_off_the_mask_and_an_empty_response_reach_nothing(random_batch, name):
    logprobs, batch = case(random_batch, 6, name)
    totals = Totals(int(batch.mask.sum()), len(batch.mask))
    clean = loss_and_gradient(name, logprobs, batch, totals)
    batch.rollout_logprobs = torch.where(batch.mask > 0, batch.rollout_logprobs, float("nan"))
    dirty = torch.where(batch.mask > 0, logprobs.detach(), -1e30)
    torch.testing.assert_close(loss_and_gradient(name, dirty, batch, totals), clean)
    assert not clean[1][batch.mask == 0].any() and clean[1].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gap", [100.0, -100.0])
def test_a_policy_far_from_the_old_one_has_a_finite_loss_and_gradient(batch_of, name, gap):
    mask = torch.tensor([[0.0, 1.0, 1.0]])
    for advantage in (1.0, -1.0, 0.0):
        batch = batch_of(torch.ones(1), [0], mask, old_logprobs=-150 * mask, selected=mask, advantages=advantage * mask)
        loss, gradient = loss_and_gradient(name, (-150 + gap) * mask, batch, Totals(2, 1))
        assert loss.isfinite() and gradient.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_on_the_old_policy_each_is_the_policy_gradient(random_batch, name):
    """Nothing is clipped, and all ratios are 1, while the policy has not moved."""
    _, batch = case(random_batch, 8, name)
    batch.selected = torch.zeros_like(batch.mask)
    batch.advantages = batch.advantages.sum(1, keepdim=True) * batch.mask  # of whole responses, as gmpo has them
    totals = Totals(int(batch.mask.sum()), len(batch.mask))
    _, gradient = loss_and_gradient(name, batch.old_logprobs, batch, totals)
    expected = -batch.advantages / totals.num_tokens
    if name in SEQUENCE_LEVEL:
        expected = -batch.advantages / batch.mask.sum(1, keepdim=True).clamp(min=1) / totals.num_sequences
    torch.testing.assert_close(gradient, expected)
