import math

import pytest
import torch

from rlhf_mp.algorithms.correction import mismatch_metrics, rollout_weights
from rlhf_mp.algorithms.losses import make_policy_loss
from rlhf_mp.config.algorithm import RolloutCorrectionConfig
from rlhf_mp.config.schema import ActorConfig
from rlhf_mp.data.types import PolicyOutput, Totals

RATIOS = torch.tensor([[1.0, 0.25, 1.5, 4.0, 1.0]])  # trainer / engine; the first and last are off the mask


def weights(method, level="token", ratios=RATIOS, **bounds):
    settings = RolloutCorrectionConfig(method, level, **bounds)
    return rollout_weights(ratios.log(), torch.zeros_like(ratios), settings)[0]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("tis", [1, 0.25, 1.5, 2, 1]),
        ("mis", [1, 0.25, 1.5, 0, 1]),
        ("icepop", [1, 0, 1.5, 0, 1]),
    ],
)
def test_token_weights_by_hand(method, expected):
    torch.testing.assert_close(weights(method, threshold=2.0, threshold_low=0.5), torch.tensor([expected]))


@pytest.mark.parametrize(("method", "expected"), [("tis", 1.4), ("mis", 0.0), ("icepop", 0.0)])
def test_a_response_weighs_by_the_product_of_its_ratios(method, expected):
    # 0.25 * 1.5 * 4 = 1.5
    torch.testing.assert_close(weights(method, "sequence", threshold=1.4), torch.full((1, 5), expected))
    torch.testing.assert_close(weights(method, "sequence", threshold=1.6), torch.full((1, 5), 1.5))


def test_far_apart_log_probs_give_finite_weights():
    far = torch.full((1, 3), 500.0)
    for level in ("token", "sequence"):
        for method, expected in (("tis", 2.0), ("mis", 0.0), ("icepop", 0.0)):
            settings = RolloutCorrectionConfig(method, level)
            assert rollout_weights(far, -far, settings)[0].tolist() == [[expected] * 3]


def corrected_loss(batch, correction, old=None):
    """The gradient of each token's log-prob, and metrics."""
    logprobs = batch.old_logprobs.clone().requires_grad_()
    batch = batch._map(lambda x: x)
    batch.old_logprobs, batch.advantages = old, torch.ones_like(batch.mask)
    actor = ActorConfig(clip_ratio_low=0.2, clip_ratio_high=0.2)
    totals = Totals(int(batch.mask.sum()), len(batch.mask))
    loss, metrics = make_policy_loss(actor, correction)(
        PolicyOutput(logprobs, torch.zeros_like(logprobs)), batch, totals
    )
    loss.backward()
    return logprobs.grad, metrics


def test_with_a_single_update_the_weight_is_that_of_the_current_policy(random_batch):
    """No log-probs are scored then: the detached current ones are the old ones."""
    batch = random_batch(1)
    correction = RolloutCorrectionConfig("tis", threshold=1.1)
    single, _ = corrected_loss(batch, correction)
    scored, _ = corrected_loss(batch, correction, old=batch.old_logprobs)
    torch.testing.assert_close(single, scored)
    ratio = (batch.old_logprobs - batch.rollout_logprobs).exp().clamp(max=1.1)
    torch.testing.assert_close(single, -ratio * batch.mask / batch.mask.sum())


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("method", ["tis", "mis", "icepop"])
def test_the_cut_into_micro_batches_and_padding_change_nothing(random_batch, method, level):
    batch = random_batch(2)
    correction = RolloutCorrectionConfig(method, level, threshold=1.2, threshold_low=0.8)
    whole, _ = corrected_loss(batch, correction)
    totals = batch.mask.sum()
    for row in range(len(batch.mask)):
        wider = batch._map(lambda x, row=row: torch.nn.functional.pad(x[[row]], (0, 2)) if x.dim() == 2 else x[[row]])
        alone, _ = corrected_loss(wider, correction)
        count = max(wider.mask.sum(), torch.tensor(1.0))
        torch.testing.assert_close(alone[:, :-2] * count / totals, whole[[row]])


def test_the_mismatch_is_logged_without_any_correction(random_batch):
    _, metrics = corrected_loss(random_batch(3), RolloutCorrectionConfig())
    assert {"rollout_kl", "rollout_ratio_max", "rollout_log_perplexity_gap"} <= metrics.keys()
    assert "correction_weight" not in metrics
    _, metrics = corrected_loss(random_batch(3), RolloutCorrectionConfig("mis", threshold=1.1))
    total, count = metrics["correction_fraction"]
    assert 0 < total < count


def test_mismatch_by_hand():
    found = mismatch_metrics(torch.tensor([[-2.0]]), torch.tensor([[-2.0 + math.log(2)]]))
    assert found["rollout_log_perplexity_gap"].item() == pytest.approx(math.log(2))  # the trainer is more surprised
    assert found["rollout_kl"].item() == pytest.approx(0.5 - 1 + math.log(2))
