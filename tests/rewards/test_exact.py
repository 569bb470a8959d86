import asyncio

import pytest

from rlhf_mp.config.schema import RewardConfig
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.rewards.registered import rewards


def test_only_the_reference_answer_counts_apart_from_white_space_around_it():
    reward = rewards["exact"](RewardConfig())
    scores = asyncio.run(
        reward.score(Prompt(0, [1], "?", " two words\n"), ["two words", "\ttwo words ", "two  words", ""])
    )
    reward.close()
    assert scores == [1.0, 1.0, 0.0, 0.0]
    assert reward.num_timeouts == 0


def test_an_unknown_reward_is_answered_with_the_known_ones():
    with pytest.raises(KeyError, match="no reward named 'maths'; known: exact, math"):
        rewards["maths"]
