"""Dynamic sampling, rewards that are no numbers, punishment of length: before anything is trained on."""

import asyncio
from dataclasses import replace

import pytest

from rlhf_mp.cluster.groups import Group, filled, numbered, require_numbers, shaped, worth_of
from rlhf_mp.config.reward import OverlongBufferConfig
from rlhf_mp.config.reward_model import RewardModelConfig
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.data.types import Trajectory
from rlhf_mp.errors import SampleError


def group(index: int, *rewards: float, baseline: float | None = None) -> Group:
    prompt = Prompt(index, [index], f"question {index}", "42")
    return Group(prompt, [Trajectory([index], [7], [0.0], [True], r, 0, 0, "stop", baseline) for r in rewards])


def fill(batches: list[list[Group]], size: int, most: int, worth=lambda t: t.reward):
    drawn = []

    async def draw(number: int) -> list[Group]:
        drawn.append(number)
        return batches[number]

    kept, metrics = asyncio.run(filled(draw, size, most, worth))
    return [g.prompt.index for g in kept], drawn, metrics


BATCHES = [
    [group(0, 1.0, 1.0), group(1, 1.0, 0.0)],
    [group(2, 0.0, 0.0), group(3, 0.0, 0.0)],
    [group(4, 0.0, 1.0), group(5, 1.0, 0.5)],
    [group(6, 0.0, 1.0), group(7, 1.0, 0.0)],
]


def test_batches_are_drawn_until_enough_groups_differ_and_no_further():
    kept, drawn, metrics = fill(BATCHES, size=2, most=4)
    assert (kept, drawn) == ([1, 4], [0, 1, 2])  # 5 is left over
    assert metrics == {"rollout/num_gen_batches": (3, 1), "rollout/kept_groups_fraction": (3, 6)}


def test_a_batch_that_cannot_be_filled_is_an_error_with_the_fix():
    with pytest.raises(SampleError, match="found 1 groups .* among 4 prompts, and a step needs 2") as error:
        fill(BATCHES, size=2, most=2)
    assert "max_num_gen_batches" in str(error.value)


def test_groups_are_numbered_by_their_place():
    assert [t.group_id for g in numbered([group(5, 0.0, 1.0), group(3, 0.0)]) for t in g] == [0, 0, 1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["reward", "baseline"])
def test_a_reward_that_is_no_number_names_its_sample(bad, where):
    broken = group(3, 1.0, bad) if where == "reward" else group(3, 1.0, baseline=bad)
    with pytest.raises(SampleError, match="not a finite number") as error:
        require_numbers([group(1, 0.5, baseline=0.0), broken], lambda ids: f"said {ids}")
    assert "prompt 3: 'question 3'" in str(error.value) and "said [7]" in str(error.value)


def test_length_is_punished_along_a_line_inside_the_buffer():
    buffer = OverlongBufferConfig(enable=True, len=4, penalty_factor=2.0)
    responses = [Trajectory([1], [7] * n, [0.0] * n, [True] * n, 1.0, 0, 0, "stop") for n in (1, 12, 13, 14, 16)]
    found = [shaped(response, 16, buffer).reward for response in responses]
    assert found == [1.0, 1.0, 0.5, 0.0, -1.0]


def scored(index: int, *pairs: tuple[float, float]) -> Group:
    """Responses of these (rule reward, score of a served reward model)."""
    plain = group(index, *(reward for reward, _ in pairs))
    responses = [replace(t, rm_score=score) for t, (_, score) in zip(plain.responses, pairs, strict=True)]
    return Group(plain.prompt, responses)


def test_with_a_served_reward_model_groups_differ_in_what_they_are_trained_on():
    batch = [
        scored(0, (0.0, 2.0), (1.0, 2.0)),  # the rule sees a difference
        scored(1, (0.0, 2.0), (0.0, 3.0)),  # the reward model does
        scored(2, (0.0, 2.0), (0.0, 2.0)),
        scored(3, (0.0, 3.0), (1.0, 2.0)),  # 0.5 x 0 + 0.5 x 3 and 0.5 x 1 + 0.5 x 2: both 1.5
    ]
    for knobs, expected in [
        ({"rule_coef": 0.0}, [1, 3]),
        ({"rule_coef": 0.5}, [0, 1, 3]),
        ({"rule_coef": 0.5, "coef": 0.5}, [0, 1]),
        ({"strategy": "actor"}, [0, 3]),
    ]:
        own = RewardModelConfig(**{"enable": True, "strategy": "sglang"} | knobs)
        assert fill([batch], len(expected), 1, worth_of(own))[0] == expected
