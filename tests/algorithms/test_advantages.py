import statistics

import pytest
import torch
from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped

from rlhf_mp.algorithms.advantages import advantage_estimators

grpo = advantage_estimators["grpo"]


def test_grpo_centres_each_group_and_scales_by_its_sample_std():
    rewards = torch.tensor([1.0, 0.0, 5.0, 5.0])
    groups = torch.tensor([7, 7, 3, 3])
    mask = torch.tensor([[0.0, 1.0, 1.0]] * 4)
    # group 7: mean 0.5, sample std sqrt(0.5) -> +-0.5/0.7071 = +-0.7071; group 3 has no spread -> 0
    expected = torch.tensor([0.7071, -0.7071, 0.0, 0.0])[:, None] * mask
    torch.testing.assert_close(grpo(rewards, groups, mask, norm_by_std=True), expected, atol=1e-4, rtol=0)


def test_without_std_the_advantage_is_the_distance_from_the_mean():
    rewards, groups = torch.tensor([4.0, 1.0, 1.0, 8.0]), torch.tensor([0, 0, 0, 1])
    advantages = grpo(rewards, groups, torch.ones(4, 1), norm_by_std=False)
    assert advantages.tolist() == [[2.0], [-1.0], [-1.0], [0.0]]  # mean 2; a group of one has only itself


@pytest.mark.parametrize("norm_by_std", [True, False])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -0.7, 1e6 + 0.1])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_equal_rewards_teach_exactly_nothing(reward, size, norm_by_std):
    """In float32 the mean of three 0.1 is not 0.1; the residue must not become an advantage."""
    rewards, groups = torch.full((size,), reward), torch.zeros(size, dtype=torch.int64)
    assert not grpo(rewards, groups, torch.ones(size, 2), norm_by_std=norm_by_std).any()


def naive_grpo(rewards, groups, norm_by_std):
    """From the definition, a sequence at a time, with the standard library."""
    advantages = []
    for reward, group in zip(rewards, groups, strict=True):
        peers = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        std = statistics.stdev(peers) if len(peers) > 1 else 0.0
        advantage = reward - statistics.fmean(peers)
        advantages.append(advantage / (std + 1e-6) if norm_by_std else advantage)
    return advantages


@pytest.mark.parametrize("norm_by_std", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_grpo_agrees_with_the_definition_in_any_order(seed, norm_by_std):
    generator = torch.Generator().manual_seed(seed)
    groups = torch.randint(100, (5,), generator=generator)[torch.randint(5, (16,), generator=generator)]
    rewards = torch.randn(16, generator=generator, dtype=torch.float64)
    mask = (torch.rand(16, 6, generator=generator) < 0.5).double()

    advantages = grpo(rewards, groups, mask, norm_by_std=norm_by_std)

    expected = torch.tensor(naive_grpo(rewards.tolist(), groups.tolist(), norm_by_std), dtype=torch.float64)
    torch.testing.assert_close(advantages, expected[:, None] * mask)
    order = torch.randperm(16, generator=generator)
    shuffled = grpo(rewards[order], groups[order], mask[order], norm_by_std=norm_by_std)
    torch.testing.assert_close(shuffled, advantages[order])


def test_a_constant_added_to_all_rewards_changes_nothing_and_std_removes_their_scale():
    rewards, groups, mask = torch.tensor([3.0, 0.0, 1.0]).double(), torch.zeros(3, dtype=torch.int64), torch.ones(3, 1)
    advantages = grpo(rewards, groups, mask.double(), norm_by_std=True)
    torch.testing.assert_close(grpo(rewards + 100, groups, mask.double(), norm_by_std=True), advantages)
    scaled = grpo(rewards * 1000, groups, mask.double(), norm_by_std=True)
    torch.testing.assert_close(scaled, advantages, atol=1e-6, rtol=1e-5)  # up to the epsilon beside the std


def test_shapes_are_part_of_the_signature():
    checked = jaxtyped(typechecker=beartype)(grpo)
    groups, mask = torch.zeros(3, dtype=torch.int64), torch.ones(3, 2)
    checked(torch.ones(3), groups, mask, norm_by_std=True)
    with pytest.raises(TypeCheckError):
        checked(torch.ones(2), groups, mask, norm_by_std=True)
    with pytest.raises(TypeCheckError):
        checked(torch.ones(3, 2), groups, mask, norm_by_std=True)
