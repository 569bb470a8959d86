import pytest
import torch
from test_normalize import shares_of
from threads_as_ranks import on_ranks

from rlhf_mp.algorithms.covariance_losses import SELECTIONS, kth_largest, largest, lots
from rlhf_mp.algorithms.normalize import only_rank
from rlhf_mp.config.schema import ActorConfig


@pytest.mark.parametrize("k", [1, 2, 5, 40])
def test_the_kth_largest_of_all_ranks_from_counts_alone(k):
    generator = torch.Generator().manual_seed(k)
    keys = torch.randint(0, 2**31, (40,), generator=generator)
    expected = keys.sort(descending=True).values[k - 1].item()
    assert kth_largest(keys, k, only_rank) == expected
    assert on_ranks(lambda mine, total: kth_largest(mine, k, total), [keys[:7], keys[7:7], keys[7:]]) == [expected] * 3


def test_ties_go_together_and_nothing_is_chosen_where_there_is_nothing():
    keys = torch.tensor([[5, 9, 9, 1]])
    assert largest(keys, keys > 0, 1.0, only_rank).tolist() == [[0, 1, 1, 0]]
    assert largest(keys, keys > 9, 3.0, only_rank).tolist() == [[0, 0, 0, 0]]


def test_kl_cov_takes_the_largest_covariances_by_hand(batch_of):
    batch = batch_of(torch.zeros(1), [0], [[0, 1, 1, 1, 1]], old_logprobs=torch.tensor([[9.0, -1, -3, -1, -3]]))
    batch.advantages = torch.tensor([[9.0, 3, 1, -1, -3]])
    # less their means, 0 and -2: 3 * 1, 1 * -1, -1 * 1, -3 * -1: two of 3, the others below 0
    for ratio in (0.01, 0.5, 1.0):
        found = SELECTIONS["kl_cov"](batch, ActorConfig(kl_cov_ratio=ratio), only_rank)
        assert found.tolist() == [[0, 1, 0, 0, 1]]


def test_clip_cov_draws_between_its_bounds(random_batch):
    batch = random_batch(0, num_groups=40)
    batch.advantages = (batch.rewards - batch.rewards.mean())[:, None] * batch.mask
    advantages, logprobs = batch.advantages[batch.mask > 0], batch.old_logprobs[batch.mask > 0]
    covariance = (batch.advantages - advantages.mean()) * (batch.old_logprobs - logprobs.mean())
    between = (covariance > 0.02) & (covariance < 0.2) & (batch.mask > 0)
    actor = ActorConfig(clip_cov_lb=0.02, clip_cov_ub=0.2, clip_cov_ratio=0.05)
    found = SELECTIONS["clip_cov"](batch, actor, only_rank)
    assert not found[~between].any()
    assert found.sum() == int(0.05 * batch.mask.sum()) < between.sum()


@pytest.mark.parametrize("name", [*SELECTIONS])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_and_order_choose_the_same_tokens(random_batch, name, num_ranks):
    batch = random_batch(num_ranks, num_groups=9)
    batch.advantages = (batch.rewards - 0.7)[:, None] * batch.mask
    actor = ActorConfig(kl_cov_ratio=0.1, clip_cov_ratio=0.1, clip_cov_lb=0.0)
    whole = SELECTIONS[name](batch, actor, only_rank)
    assert 0 < whole.sum() < batch.mask.sum()
    rows, shares = shares_of(batch, num_ranks)
    for own, part in zip(rows, on_ranks(lambda b, total: SELECTIONS[name](b, actor, total), shares), strict=True):
        assert torch.equal(part, whole[own])


def test_lots_are_spread_evenly_and_belong_to_the_response(random_batch):
    batch = random_batch(1, num_groups=200)
    drawn = lots(batch)
    shares = torch.histc(drawn.double(), bins=4, min=0, max=2**31) / drawn.numel()
    assert shares.tolist() == pytest.approx([0.25] * 4, abs=0.03)
    order = torch.randperm(len(drawn)).tolist()
    assert torch.equal(lots(batch.select(order)), drawn[order])
