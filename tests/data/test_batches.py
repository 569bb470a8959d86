"""Batches of examples: each in one place, pairs together, the same at any number of ranks."""

from array import array

import pytest

from rlhf_mp.data.batches import Batches
from rlhf_mp.data.collate import collate
from rlhf_mp.data.examples import Example, Learned
from rlhf_mp.data.order import PromptOrder
from rlhf_mp.data.partition import Cut
from rlhf_mp.errors import ConfigError


def pair(number: int) -> Example:
    """Sequences that begin with the pair's number, of 3 to 9 tokens."""
    lengths = (3 + number % 5, 3 + number * 3 % 7)
    return Example(tuple(Learned(array("i", [number] * n), b"\0" + b"\1" * (n - 1)) for n in lengths), margin=0.5)


def batches(dp_rank: int = 0, dp_size: int = 1, cut: Cut = Cut(max_tokens=24)) -> Batches:
    return Batches([pair(i) for i in range(20)], PromptOrder(20, 8, 1, True), (cut, cut), dp_rank, dp_size)


@pytest.mark.parametrize("dp_size", [1, 2, 3])
@pytest.mark.parametrize("cut", [Cut(max_tokens=24), Cut(max_sequences=2), Cut(max_sequences=5)])
def test_ranks_share_a_batch_and_pairs_stay_together_the_better_first(dp_size, cut):
    shares = [batches(rank, dp_size, cut).fetch() for rank in range(dp_size)]
    numbers = sorted(t.response_ids[0] for share in shares for t in share.trajectories)
    assert numbers == sorted(2 * [i for i in PromptOrder(20, 8, 1, True).next()[1]])
    (totals,) = {share.minibatches[0].totals for share in shares}
    assert totals.num_sequences == 16
    assert totals.num_tokens == sum(sum(t.loss_mask) for share in shares for t in share.trajectories)
    assert len({len(share.minibatches[0].micro_batches) for share in shares}) == 1
    for share in shares:
        for rows in share.minibatches[0].micro_batches + share.score_rows:
            assert len(rows) % 2 == 0
            for chosen, rejected in zip(rows[::2], rows[1::2], strict=True):
                better, worse = share.trajectories[chosen], share.trajectories[rejected]
                assert (better.group_id, better.reward, worse.reward) == (worse.group_id, 0.5, 0.0)
            assert cut.max_tokens is None or collate([share.trajectories[r] for r in rows or [0]]).tokens.numel() <= 24


def test_a_batch_after_resuming_is_the_one_that_would_have_come():
    straight, before, after = batches(), batches(), batches()
    expected = [straight.fetch().trajectories for _ in range(5)]
    for _ in range(3):
        before.fetch()
    after.load_state_dict(before.state_dict())
    assert [after.fetch().trajectories for _ in range(2)] == expected[3:]


def test_fewer_held_out_examples_than_ranks_are_told():
    with pytest.raises(ConfigError, match="2 examples for 3 ranks"):
        batches(0, 3).share([pair(1), pair(2)])
