"""Rows and tokens at which a number stops being one are found, whatever it is that goes wrong."""

import math
from dataclasses import replace

import pytest
import torch

from rlhf_mp.algorithms.losses import make_policy_loss
from rlhf_mp.algorithms.supervised import bradley_terry_loss
from rlhf_mp.config.derive import derive
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.data.types import PolicyOutput, RewardOutput, TokenBatch, Totals
from rlhf_mp.train.nonfinite import GRADIENT, LOSS, MODEL, Finding, Search, findings_of

TOTALS = Totals(9, 4)


def usual_loss():
    config = RunConfig()
    derive(config)
    return make_policy_loss(config.actor_rollout_ref.actor)


policy_loss = usual_loss()


def batch() -> TokenBatch:
    """Four rows; the last is a response of no tokens."""
    mask = torch.tensor([[0, 1, 1, 1, 0], [0, 1, 0, 1, 1], [0, 1, 1, 1, 0], [0, 0, 0, 0, 0]]).float()
    logprobs = -torch.linspace(0.1, 2.0, 20).view(4, 5) * mask
    return TokenBatch(
        tokens=torch.arange(20).view(4, 5),
        mask=mask,
        rewards=torch.tensor([1.0, 0.0, 0.5, 0.5]),
        group_ids=torch.arange(4),
        lengths=torch.tensor([4, 5, 4, 1]),
        rollout_logprobs=logprobs,
        old_logprobs=logprobs * 1.01,
        advantages=torch.ones(4, 5) * mask,
    )


def output(logprobs: torch.Tensor | None = None) -> PolicyOutput:
    logprobs = batch().old_logprobs * 1.02 if logprobs is None else logprobs
    return PolicyOutput(logprobs.clone().requires_grad_(), torch.zeros(4, 5))


def found(loss_fn=policy_loss, out: PolicyOutput | None = None, changed: TokenBatch | None = None) -> list[Finding]:
    return [*findings_of(loss_fn, out or output(), changed or batch(), TOTALS)]


def test_a_healthy_batch_has_nothing_to_find():
    assert found() == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_input_that_is_none_is_told_first(bad):
    harmed = batch()
    harmed.advantages[1, 3] = bad
    first, *others = found(changed=harmed)
    assert first == Finding("advantages", 1, [3])
    assert {(finding.row, *finding.tokens) for finding in others} <= {(1, 3)}


def test_what_the_model_computed_is_told_with_its_tokens():
    logprobs = batch().old_logprobs * 1.02
    logprobs[2, 1] = logprobs[2, 3] = torch.nan
    logprobs[0, 0] = torch.inf  # a token of the prompt: nobody reads it
    first, second = found(out=output(logprobs))
    assert first == Finding(MODEL, 2, [1, 3]) and second == Finding(LOSS, 2, [1, 3])


def own_loss(harm):
    """The usual loss, with a harm done to some of its tokens, by their ids."""

    def loss_fn(output, batch, totals):
        loss, metrics = policy_loss(output, batch, totals)
        return loss + torch.where(batch.mask > 0, harm(output.logprobs, batch), 0.0).sum(), metrics

    return loss_fn


def test_a_loss_of_ones_own_is_found_out_token_by_token():
    def harm(logprobs, batch):
        return torch.where((batch.tokens == 9) | (batch.tokens == 2), torch.nan, logprobs)

    first, second = found(own_loss(harm))
    assert (first, second) == (Finding(LOSS, 0, [2]), Finding(LOSS, 1, [4]))


def test_a_loss_that_only_tokens_together_spoil_is_told_by_its_row():
    def harm(logprobs, batch):
        together = (batch.tokens * batch.mask).sum(1, keepdim=True) == 6 + 8 + 9
        return torch.where(together, torch.nan, 0.0).expand(logprobs.shape)

    assert found(own_loss(harm)) == [Finding(LOSS, 1, [])]


def test_a_gradient_that_is_none_though_the_loss_is_one():
    def harm(logprobs, batch):  # the root of 0 has no slope
        return torch.where(batch.tokens == 12, logprobs * 0, 1.0).sqrt()

    assert found(own_loss(harm)) == [Finding(GRADIENT, 2, [2])]


def test_rows_of_a_share_are_named_across_its_micro_batches():
    harmed = batch()
    harmed.advantages[2, 1] = torch.nan
    search = Search(policy_loss, [[3, 1], [], [2, 0]])
    for rows in search.cut:
        picked = output().logprobs.detach()[rows or [0]]
        part = harmed.select(rows)
        search(PolicyOutput(picked[:, : part.tokens.shape[1]], torch.zeros_like(part.mask)), part, TOTALS)
    search(PolicyOutput(torch.zeros(1, 2), torch.zeros(1, 2)), harmed.silenced(), TOTALS)  # a pipeline's own
    assert [finding for finding in search.found if finding.what == "advantages"] == [Finding("advantages", 2, [1])]
    assert {finding.row for finding in search.found} == {2}


def test_pairs_stay_together():
    rewards = torch.tensor([1.0, 0.5, torch.inf, torch.inf]).requires_grad_()
    found = [
        *findings_of(bradley_terry_loss, RewardOutput(rewards), replace(batch(), rewards=torch.zeros(4)), TOTALS, 2)
    ]
    assert [(finding.what, finding.row) for finding in found] == [(MODEL, 2), (MODEL, 3), (LOSS, 2), (LOSS, 3)]
    assert found[-1].tokens == []
