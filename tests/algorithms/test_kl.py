import math

import pytest
import torch

from rlhf_mp.algorithms.kl import LOG_RATIO_MAX, k1, k2, k3, kl_estimators


def test_each_estimator_by_hand():
    logprobs, reference = torch.log(torch.tensor([[0.5, 0.2]])), torch.log(torch.tensor([[0.25, 0.4]]))
    # log(policy / reference) = log 2, -log 2; r = reference / policy = 1/2, 2
    ln2 = math.log(2)
    torch.testing.assert_close(k1(logprobs, reference), torch.tensor([[ln2, -ln2]]))
    torch.testing.assert_close(k2(logprobs, reference), torch.tensor([[ln2**2 / 2, ln2**2 / 2]]))
    torch.testing.assert_close(k3(logprobs, reference), torch.tensor([[0.5 - 1 + ln2, 2 - 1 - ln2]]))


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_exact_kl(name):
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 9, generator=generator, dtype=torch.float64).softmax(-1)
    estimates = kl_estimators[name](p.log()[None], q.log()[None])
    # the expectation over tokens drawn from p, summed exactly instead of sampled
    torch.testing.assert_close((p * estimates).sum(), (p * (p / q).log()).sum())


@pytest.mark.parametrize("name", [*kl_estimators])
def test_equal_distributions_have_no_divergence(name):
    logprobs = torch.tensor([[-0.1, -5.0]])
    assert not kl_estimators[name](logprobs, logprobs).any()


def test_k3_keeps_its_digits_for_nearly_equal_logprobs_where_exp_minus_one_loses_them():
    reference, logprobs = torch.tensor([[-1e-4]]), torch.tensor([[0.0]])
    exact = math.expm1(-1e-4) + 1e-4  # 5e-9; exp(x) - 1 - x in float32 is wrong by more than that
    assert k3(logprobs, reference).item() == pytest.approx(exact, rel=1e-2)
    assert (reference.exp() - 1 - reference).item() != pytest.approx(exact, rel=1)


def test_k3_is_finite_with_its_gradient_however_far_apart_the_models_are():
    logprobs = torch.tensor([[-1000.0, 0.0, -1.0]], requires_grad=True)
    estimates = k3(logprobs, torch.tensor([[0.0, -1000.0, -1.0]]))
    estimates.sum().backward()
    # r = e^1000, bounded to e^20 without gradient; r = e^-1000: 0 - 1 + 1000, gradient 1 - r = 1; r = 1: 0
    torch.testing.assert_close(estimates[0].tolist(), [math.expm1(LOG_RATIO_MAX) - LOG_RATIO_MAX, 999.0, 0.0])
    assert logprobs.grad.tolist() == [[0.0, 1.0, 0.0]]
