from dataclasses import replace

import pytest
import torch
from torch import tensor

from rlhf_mp.data.collate import collate, with_estimates
from rlhf_mp.data.types import SampleText, TokenTrace, Trajectory

SHORT = Trajectory([11, 12], [13], [-0.5], [True], reward=1.0, group_id=4, version=0, finish_reason="stop")
LONG = Trajectory(
    prompt_ids=[21],
    response_ids=[22, 23, 24, 25],
    response_logprobs=[-1.0, -2.0, 0.0, -4.0],
    loss_mask=[True, True, False, True],
    reward=0.25,
    group_id=9,
    version=1,
    finish_reason="length",
)


def test_per_token_fields_are_aligned_on_the_token_they_score():
    batch = collate([SHORT, LONG])
    assert batch.tokens.tolist() == [[11, 12, 13, 0, 0], [21, 22, 23, 24, 25]]
    assert batch.mask.tolist() == [[0, 0, 1, 0, 0], [0, 1, 1, 0, 1]]
    assert batch.rollout_logprobs.tolist() == [[0, 0, -0.5, 0, 0], [0, -1, -2, 0, -4]]
    assert batch.rewards.tolist() == [1.0, 0.25]
    assert batch.group_ids.tolist() == [4, 9]
    assert batch.lengths.tolist() == [3, 5]
    assert (batch.tokens.dtype, batch.mask.dtype, batch.rewards.dtype) == (torch.int64, torch.float32, torch.float32)
    assert batch.old_logprobs is batch.ref_logprobs is batch.advantages is None


def test_what_an_environment_paid_stands_where_its_turn_ended():
    turns = replace(LONG, num_turns=2, payments=[(1, 0.5), (3, -0.25)])
    assert collate([SHORT, turns]).paid.tolist() == [[0, 0, 0, 0, 0], [0, 0, 0.5, 0, -0.25]]
    assert collate([SHORT, LONG]).paid is None


def test_selecting_a_row_undoes_the_padding_other_rows_caused():
    together, alone = collate([SHORT, LONG]).select([0]), collate([SHORT])
    for name in ("tokens", "mask", "rewards", "group_ids", "lengths", "rollout_logprobs"):
        torch.testing.assert_close(getattr(together, name), getattr(alone, name))


def test_selecting_nothing_gives_a_row_that_counts_for_nothing():
    nothing = collate([SHORT, LONG]).select([])
    assert nothing.tokens.tolist() == [[11, 12]]
    assert nothing.mask.tolist() == [[0, 0]]


def test_the_order_of_trajectories_is_the_order_of_rows():
    torch.testing.assert_close(collate([LONG, SHORT]).tokens, collate([SHORT, LONG]).tokens[[1, 0]])


def test_a_response_may_be_empty():
    aborted = replace(SHORT, response_ids=[], response_logprobs=[], loss_mask=[], finish_reason="abort")
    torch.testing.assert_close(collate([aborted, SHORT]).tokens, tensor([[11, 12, 0], [11, 12, 13]]))


@pytest.mark.parametrize("change", [{"response_logprobs": [-1.0, -1.0]}, {"loss_mask": []}, {"response_ids": [1, 2]}])
def test_log_probs_or_a_mask_of_another_length_are_refused(change):
    with pytest.raises(ValueError, match="trajectory 1 has . response tokens"):
        collate([LONG, replace(SHORT, **change)])


def test_no_trajectories_are_refused():
    with pytest.raises(ValueError, match="no trajectories"):
        collate([])


def test_a_sample_gets_what_training_made_of_its_row():
    batch = collate([LONG, SHORT])
    batch.advantages, batch.values = batch.tokens * batch.mask, batch.tokens * 0.5
    trace = TokenTrace(SHORT.response_ids, SHORT.response_logprobs, SHORT.loss_mask, "stop")
    sample = SampleText("prompt", "response", 1.0, "truth", trace=trace, row=1)
    found = with_estimates(sample, batch).trace
    assert (found.advantages, found.values, found.ref_logprobs) == ([13.0], [6.5], None)
    found = with_estimates(replace(sample, row=0, trace=replace(trace, ids=LONG.response_ids)), batch).trace
    assert found.advantages == [22.0, 23.0, 0.0, 25.0]
    assert with_estimates(replace(sample, row=None), batch).trace == trace


def test_rewards_of_greedy_responses_are_there_for_all_or_not_at_all():
    assert collate([SHORT, LONG]).baselines is None
    greedy = [replace(SHORT, baseline=0.5), replace(LONG, baseline=0.0)]
    assert collate(greedy).baselines.tolist() == [0.5, 0.0]
