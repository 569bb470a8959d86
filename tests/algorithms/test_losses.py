import math
from dataclasses import replace

import pytest
import torch

from rlhf_mp.algorithms.aggregate import loss_aggregations
from rlhf_mp.algorithms.kl import kl_estimators
from rlhf_mp.algorithms.losses import make_policy_loss, policy_losses
from rlhf_mp.config.schema import ActorConfig
from rlhf_mp.data.types import PolicyOutput, TokenBatch, Totals

ppo_clip = policy_losses["ppo_clip"]


def actor(**changes):
    return ActorConfig(**({"clip_ratio_low": 0.2, "clip_ratio_high": 0.28} | changes))


def batch_of(mask, advantages=None, rollout=None, **fields):
    """A batch in which only what the loss reads means something."""
    num_rows, width = mask.shape
    return TokenBatch(
        tokens=torch.zeros(num_rows, width, dtype=torch.int64),
        mask=mask,
        rewards=torch.zeros(num_rows),
        group_ids=torch.zeros(num_rows, dtype=torch.int64),
        lengths=torch.full((num_rows,), width),
        rollout_logprobs=torch.zeros_like(mask) if rollout is None else rollout,
        advantages=torch.ones_like(mask) if advantages is None else advantages,
        **fields,
    )


def test_ppo_clip_by_hand_with_its_own_bound_on_each_side():
    ratio = torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.1]])
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, 2.0]])
    logprobs = ratio.log().requires_grad_()
    terms = ppo_clip(logprobs, batch_of(torch.ones(1, 5), advantages, old_logprobs=torch.zeros(1, 5)), actor())
    loss = terms.loss
    loss.sum().backward()
    # A > 0: -min(r, 1.28) A; A < 0: -max(r, 0.8) A
    torch.testing.assert_close(loss, torch.tensor([[-1.28, 1.5, -0.5, 0.8, -2.2]]))
    assert terms.metrics["clip_fraction"].tolist() == [[1.0, 0.0, 0.0, 1.0, 0.0]]
    assert terms.metrics["clip_fraction_high"].tolist() == [[1.0, 0.0, 0.0, 0.0, 0.0]]
    assert terms.metrics["clip_fraction_low"].tolist() == [[0.0, 0.0, 0.0, 1.0, 0.0]]
    # d(-r A)/dlogp = -r A where it is not clipped: clipping stops only the direction already taken
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.0, 1.5, -0.5, 0.0, -2.2]]))


def test_without_old_logprobs_the_gradient_is_the_plain_policy_gradient():
    logprobs = torch.tensor([[-9.0, -1.0, -2.0]], requires_grad=True)
    batch = batch_of(torch.tensor([[0.0, 1.0, 1.0]]), advantages=torch.tensor([[5.0, 3.0, -1.0]]))
    output = PolicyOutput(logprobs, torch.zeros(1, 3))
    loss, metrics = make_policy_loss(actor())(output, batch, Totals(num_tokens=4, num_sequences=1))
    loss.backward()
    # the ratio is 1: loss = -(3 - 1)/4, gradient -A/4; the prompt token has none
    assert loss.item() == -0.5
    assert logprobs.grad.tolist() == [[0.0, -0.75, 0.25]]
    assert [x.item() for x in metrics["approx_kl"]] == [0.0, 2.0]
    assert [x.item() for x in metrics["clip_fraction"]] == [0.0, 2.0]


def test_entropy_is_rewarded_and_divergence_from_the_reference_is_punished():
    half = math.log(0.5)
    mask = torch.tensor([[0.0, 1.0, 1.0]])
    reference = torch.tensor([[0.0, half, math.log(0.25)]])
    batch = batch_of(mask, old_logprobs=torch.full((1, 3), half), ref_logprobs=reference)
    output = PolicyOutput(torch.full((1, 3), half), torch.tensor([[7.0, 1.0, 3.0]]))
    configured = actor(entropy_coeff=0.1, use_kl_loss=True, kl_loss_coef=2.0, kl_loss_type="k2")
    loss, metrics = make_policy_loss(configured)(output, batch, Totals(num_tokens=2, num_sequences=1))
    # policy: -1; entropy: (1 + 3)/2 = 2; k2: (0 + log(2)^2 / 2)/2
    divergence = math.log(2) ** 2 / 4
    assert loss.item() == pytest.approx(-1 - 0.1 * 2 + 2 * divergence)
    assert ratio_of(metrics["pg_loss"]) == -1
    assert ratio_of(metrics["loss"]) == pytest.approx(loss.item())
    assert ratio_of(metrics["entropy"]) == 2
    assert ratio_of(metrics["kl_to_reference"]) == pytest.approx(divergence)


def ratio_of(metric):
    total, count = metric
    return (total / count).item()


def test_metrics_by_hand():
    mask = torch.tensor([[0.0, 1.0, 1.0, 1.0]])
    log2, log4 = math.log(2), math.log(4)
    batch = batch_of(
        mask,
        old_logprobs=torch.tensor([[-50.0, -1.0, -1.0, -1.0]]),
        rollout=torch.tensor([[0.0, -1.0 + log4, -1.0 - log2, -1.0]]),
    )
    output = PolicyOutput(torch.tensor([[-3.0, -1.0 + log4, -1.0, -1.0 - log2]]), torch.zeros(1, 4))
    _, metrics = make_policy_loss(actor())(output, batch, Totals(num_tokens=12, num_sequences=4))
    assert {count.item() for name, (_, count) in metrics.items() if not name.endswith(("loss", "max"))} == {3.0}
    assert {metrics[name][1].item() for name in ("loss", "pg_loss")} == {0.25}  # 3 of the mini-batch's 12 tokens
    # policy / old = 4, 1, 1/2 -> r - 1 - log r; only the first is above 1.28 with a positive advantage
    assert metrics["approx_kl"][0].item() == pytest.approx((4 - 1 - log4) + 0 + (0.5 - 1 + log2))
    assert metrics["clip_fraction"][0] == 1
    # rollout - old = log 4, -log 2, 0: old / rollout = 1/4, 2, 1
    assert metrics["rollout_logprob_difference"][0].item() == pytest.approx(log4 + log2)
    assert metrics["rollout_kl"][0].item() == pytest.approx((0.25 - 1 + log4) + (2 - 1 - log2))
    # the trainer's perplexity over the engine's, as a log: the mean of log 4, -log 2, 0
    assert metrics["rollout_log_perplexity_gap"][0].item() == pytest.approx(log4 - log2)
    assert metrics["ratio_mean"][0].item() == pytest.approx(4 + 1 + 0.5)
    assert [x.item() for x in metrics["ratio_max"]] == pytest.approx([4, 1])
    assert [x.item() for x in metrics["rollout_ratio_max"]] == pytest.approx([2, 1])
    assert "kl_to_reference" not in metrics
    assert not any(x.requires_grad for pair in metrics.values() for x in pair)


def random_case(seed, num_rows=5, width=7):
    generator = torch.Generator().manual_seed(seed)
    logprobs, old, reference, rollout = -torch.rand(4, num_rows, width, generator=generator, dtype=torch.float64) * 2
    mask = (torch.rand(num_rows, width, generator=generator) < 0.6).double()
    mask[:, 0] = 0
    advantages = torch.randn(num_rows, width, generator=generator, dtype=torch.float64)
    entropy = torch.rand(num_rows, width, generator=generator, dtype=torch.float64)
    batch = batch_of(mask, advantages, rollout, old_logprobs=old, ref_logprobs=reference)
    return PolicyOutput(logprobs.requires_grad_(), entropy.requires_grad_()), batch


def naive_loss(output, batch, c):
    """Token by token from the papers' formulas, with k3 written as on the page it comes from."""
    logprobs, rows = output.logprobs.detach(), []
    for b in range(len(batch.mask)):
        losses = []
        for t in batch.mask[b].nonzero().flatten().tolist():
            ratio = math.exp(logprobs[b, t] - batch.old_logprobs[b, t])
            bounded = min(max(ratio, 1 - c.clip_ratio_low), 1 + c.clip_ratio_high)
            advantage = batch.advantages[b, t].item()
            r = math.exp(batch.ref_logprobs[b, t] - logprobs[b, t])
            kl = (r - 1) - math.log(r)
            losses.append(
                -min(ratio * advantage, bounded * advantage)
                - c.entropy_coeff * output.entropy[b, t].item()
                + c.kl_loss_coef * kl
            )
        rows.append(losses)
    if c.loss_agg_mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if c.loss_agg_mode == "seq-mean-token-sum":
        return sum(map(sum, rows)) / len(rows)
    return sum(sum(losses) / len(losses) for losses in rows if losses) / len(rows)


@pytest.mark.parametrize("mode", [*loss_aggregations])
@pytest.mark.parametrize("seed", range(3))
def test_the_whole_loss_agrees_with_the_formulas(mode, seed):
    output, batch = random_case(seed)
    configured = actor(loss_agg_mode=mode, entropy_coeff=0.3, use_kl_loss=True, kl_loss_coef=0.7)
    totals = Totals(num_tokens=int(batch.mask.sum()), num_sequences=5)
    loss, _ = make_policy_loss(configured)(output, batch, totals)
    assert loss.item() == pytest.approx(naive_loss(output, batch, configured))


def test_the_gradient_is_the_derivative():
    output, batch = random_case(9)
    loss_fn = make_policy_loss(actor(entropy_coeff=0.3, use_kl_loss=True, kl_loss_coef=0.7))
    totals = Totals(num_tokens=int(batch.mask.sum()), num_sequences=5)

    def loss(logprobs, entropy):
        return loss_fn(PolicyOutput(logprobs, entropy), batch, totals)[0]

    assert torch.autograd.gradcheck(loss, (output.logprobs, output.entropy))


@pytest.mark.parametrize("kl_loss_type", [*kl_estimators])
def test_garbage_off_the_mask_reaches_neither_loss_nor_gradient_nor_metrics(kl_loss_type):
    mask = torch.tensor([[0.0, 1.0, 0.0]])
    garbage = torch.tensor([[-1e30, -1.0, float("nan")]])
    clean = torch.tensor([[0.0, -1.0, 0.0]])
    loss_fn = make_policy_loss(actor(entropy_coeff=0.1, use_kl_loss=True, kl_loss_type=kl_loss_type))
    results = []
    for x in (garbage, clean):
        logprobs = x.clone().requires_grad_()
        batch = batch_of(mask, rollout=x, old_logprobs=clean, ref_logprobs=-x)
        loss, metrics = loss_fn(PolicyOutput(logprobs, -x), batch, Totals(num_tokens=1, num_sequences=1))
        loss.backward()
        results.append((loss.detach(), logprobs.grad, metrics))
    torch.testing.assert_close(results[0], results[1])
    assert results[0][1][0, 1] != 0


@pytest.mark.parametrize("gap", [100.0, -100.0])
def test_a_policy_far_from_the_old_one_and_the_reference_has_a_finite_loss_and_gradient(gap):
    logprobs = torch.tensor([[0.0, -150.0]], requires_grad=True)
    far = logprobs.detach() - gap
    batch = batch_of(torch.tensor([[0.0, 1.0]]), -torch.ones(1, 2), old_logprobs=far, ref_logprobs=far)
    loss, metrics = make_policy_loss(actor(use_kl_loss=True))(
        PolicyOutput(logprobs, torch.zeros(1, 2)), batch, Totals(num_tokens=1, num_sequences=1)
    )
    loss.backward()
    assert loss.isfinite()
    assert logprobs.grad.isfinite().all()
    assert all(total.isfinite() for total, _ in metrics.values())


def test_an_empty_micro_batch_adds_nothing_to_the_loss_the_gradient_or_any_metric():
    output, batch = random_case(3)
    stub = batch.select([])
    logprobs = output.logprobs.detach()[:1, :2].clone().requires_grad_()
    loss_fn = make_policy_loss(actor(entropy_coeff=0.1, use_kl_loss=True))
    loss, metrics = loss_fn(PolicyOutput(logprobs, output.entropy[:1, :2]), stub, Totals(8, 4))
    loss.backward()
    assert loss.item() == 0
    assert not logprobs.grad.any()
    assert all(total == 0 and count == 0 for total, count in metrics.values())


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(KeyError, match="no policy loss named 'ppo'; known: cispo, clip_cov, .*ppo_clip"):
        make_policy_loss(replace(actor(), policy_loss="ppo"))
