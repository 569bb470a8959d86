import statistics

import pytest
import torch
from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped

from rlhf_mp.algorithms.registered import advantage_estimators
from rlhf_mp.config.algorithm import AlgorithmConfig

GROUP_ESTIMATORS = ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "gpg", "opo", "grpo_passk"]
MASK3 = [[0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 0]]
REWARDS = [4.0, 1.0, 1.0, 5.0, 5.0]
GROUPS = [7, 7, 7, 3, 3]


def of(name, batch, **settings):
    """Each response's advantage, which all its chosen tokens share."""
    advantages = advantage_estimators[name](batch, AlgorithmConfig(**settings)).advantages
    shared = (advantages.sum(1) / batch.mask.sum(1).clamp(min=1))[:, None] * batch.mask
    torch.testing.assert_close(advantages, shared)
    return (advantages.sum(1) / batch.mask.sum(1).clamp(min=1)).tolist()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # group 7: mean 2, sample variance (4 + 1 + 1) / 2 = 3; group 3 has no spread
        ("grpo", [2 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5, 0, 0]),
        ("dr_grpo", [2, -1, -1, 0, 0]),
        ("reinforce_plus_plus_baseline", [2, -1, -1, 0, 0]),
        ("gpg", [2, -1, -1, 0, 0]),
        ("rloo", [4 - (1 + 1) / 2, 1 - (4 + 1) / 2, 1 - (4 + 1) / 2, 0, 0]),
        # lengths 3, 1, 2: baseline (12 + 1 + 2) / 6 = 2.5
        ("opo", [1.5, -1.5, -1.5, 0, 0]),
        # 4 is 3 above the second best
        ("grpo_passk", [3 / 3**0.5, 0, 0, 0, 0]),
    ],
)
def test_each_by_hand(batch_of, name, expected):
    batch = batch_of(REWARDS, GROUPS, MASK3)
    assert of(name, batch) == pytest.approx(expected, abs=1e-5)


def test_passk_without_deviation_and_with_a_tie(batch_of):
    batch = batch_of([3.0, 1.0, 3.0, 2.0, 0.5], [0, 0, 0, 1, 1], MASK3)
    assert of("grpo_passk", batch, norm_adv_by_std_in_grpo=False) == pytest.approx([0, 0, 0, 1.5, 0])


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -0.7, 1e6 + 0.1])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_equal_rewards_teach_exactly_nothing(batch_of, name, reward, size):
    """In float32 the mean of three 0.1 is not 0.1; the residue must not become an advantage."""
    batch = batch_of([reward] * size, [0] * size, [[1, 1]] * size)
    assert not advantage_estimators[name](batch, AlgorithmConfig()).advantages.any()


def naive(name, rewards, lengths, peers, i):
    """From the papers, a response at a time, with the standard library."""
    own, others = rewards[i], [rewards[j] for j in peers if j != i]
    group = [rewards[j] for j in peers]
    std = statistics.stdev(group) if len(group) > 1 else 0.0
    if name == "grpo":
        return (own - statistics.fmean(group)) / (std + 1e-6)
    if name == "rloo":
        return own - statistics.fmean(others)
    if name == "opo":
        weight = sum(lengths[j] for j in peers)
        return own - sum(lengths[j] * rewards[j] for j in peers) / weight
    if name == "grpo_passk":
        return (max(group) - max(others)) / (std + 1e-6)
    return own - statistics.fmean(group)


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@pytest.mark.parametrize("seed", range(4))
def test_each_agrees_with_its_definition_in_any_order_and_with_any_padding(random_batch, name, seed):
    batch = random_batch(seed)
    rewards, lengths = batch.rewards.tolist(), batch.mask.sum(1).tolist()
    groups = batch.group_ids.tolist()
    peers = [[j for j, g in enumerate(groups) if g == own] for own in groups]
    expected = torch.tensor([naive(name, rewards, lengths, peers[i], i) for i in range(len(groups))]).double()
    settings = AlgorithmConfig()

    advantages = advantage_estimators[name](batch, settings).advantages

    torch.testing.assert_close(advantages, expected[:, None] * batch.mask, atol=1e-6, rtol=1e-6)
    order = torch.randperm(len(groups)).tolist()
    torch.testing.assert_close(advantage_estimators[name](batch.select(order), settings).advantages, advantages[order])
    wider = batch._map(lambda x: torch.nn.functional.pad(x, (0, 3)) if x.dim() == 2 else x)
    found = advantage_estimators[name](wider, settings).advantages
    torch.testing.assert_close(found, torch.nn.functional.pad(advantages, (0, 3)))


def test_a_constant_added_to_all_rewards_changes_nothing_and_std_removes_their_scale(batch_of):
    rewards = torch.tensor([3.0, 0.0, 1.0]).double()
    advantages = of("grpo", batch_of(rewards, [0] * 3, [[1]] * 3))
    assert of("grpo", batch_of(rewards + 100, [0] * 3, [[1]] * 3)) == pytest.approx(advantages)
    assert of("grpo", batch_of(rewards * 1000, [0] * 3, [[1]] * 3)) == pytest.approx(advantages, rel=1e-5)


def test_shapes_are_part_of_a_batch(batch_of):
    checked = jaxtyped(typechecker=beartype)(advantage_estimators["grpo"])
    checked(batch_of(torch.ones(3), [0] * 3, torch.ones(3, 2)), AlgorithmConfig())
    with pytest.raises(TypeCheckError):
        checked(torch.ones(3), AlgorithmConfig())
