import pytest
import torch
from threads_as_ranks import on_ranks

from rlhf_mp.algorithms.normalize import NORMALIZATIONS, only_rank, whiten

SCALED = ["none", "whiten", "spread"]


def shares_of(batch, num_ranks):
    """Whole groups in turn to each rank: their rows, and what they hold."""
    groups = sorted(set(batch.group_ids.tolist()))
    rows = [
        [i for i, g in enumerate(batch.group_ids.tolist()) if groups.index(g) % num_ranks == rank]
        for rank in range(num_ranks)
    ]
    return rows, [batch._map(lambda x, own=own: x[own]) for own in rows]


def test_whitening_by_hand(batch_of):
    advantages = torch.tensor([[9.0, 1.0, 2.0], [9.0, 6.0, 9.0]]).double()
    batch = batch_of(torch.zeros(2).double(), [0, 0], [[0, 1, 1], [0, 1, 0]])
    # 1, 2, 6: mean 3, sample variance (4 + 1 + 9) / 2 = 7
    expected = torch.tensor([[0, -2, -1], [0, 3, 0]]).double() / 7**0.5
    torch.testing.assert_close(whiten(advantages, batch, only_rank), expected, atol=1e-8, rtol=1e-8)


def test_groups_without_spread_are_made_up_for(batch_of):
    batch = batch_of([1.0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 2, 2], [[0, 1]] * 6)
    advantages = torch.tensor([[0, 0.5], [0, -0.5]] + [[0, 0.0]] * 4)
    found = NORMALIZATIONS["spread"](advantages, batch, only_rank)  # 6 responses, 2 of them teach
    assert found[:, 1].tolist() == [1.5, -1.5, 0, 0, 0, 0]


@pytest.mark.parametrize("name", SCALED)
def test_without_a_token_or_a_difference_nothing_becomes_nan(batch_of, name):
    empty = batch_of([1.0, 0.0], [0, 0], [[0, 0], [0, 0]])
    assert not NORMALIZATIONS[name](torch.zeros(2, 2), empty, only_rank).any()
    equal = batch_of([1.0, 1.0], [0, 0], [[0, 1], [0, 1]])
    found = NORMALIZATIONS[name](torch.zeros(2, 2), equal, only_rank)
    assert not found.any() and found.isfinite().all()


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_number_of_ranks_changes_nothing(random_batch, name, num_ranks):
    batch = random_batch(num_ranks)
    advantages = (batch.rewards - 0.3)[:, None] * batch.mask
    whole = NORMALIZATIONS[name](advantages, batch, only_rank)
    rows, shares = shares_of(batch, num_ranks)
    jobs = list(zip(shares, [advantages[own] for own in rows], strict=True))
    found = on_ranks(lambda job, total: NORMALIZATIONS[name](job[1], job[0], total), jobs)
    for own, part in zip(rows, found, strict=True):
        torch.testing.assert_close(part, whole[own], atol=1e-14, rtol=1e-13)
