"""The canary: agreement is silent, and whatever else is an error that names engine, version and knob."""

import math

import pytest
import torch

from rlhf_mp.data.types import Trajectory
from rlhf_mp.errors import SyncError
from rlhf_mp.rollout.base import Completion
from rlhf_mp.weights.canary import Canary, make_canary

CANARY = Canary(prompt_ids=[3, 4], num_tokens=3, temperature=0.7, tolerance=0.01)
# Two prompt tokens, then two or three sampled ones: rows are padded to the longer.
SAMPLED = [
    Trajectory([3, 4], [5, 6, 7], [-1.0, -2.0, -3.0], [True] * 3, 0.0, 0, 8, "length"),
    Trajectory([3, 4], [5, 6], [-1.0, -2.0], [True] * 2, 0.0, 0, 8, "stop"),
]
SCORED = torch.tensor([[0.0, 0.0, -1.0, -2.0, -3.0], [0.0, 0.0, -1.0, -2.0, 0.0]])
NAMES = ["engine 0", "engine 1"]


def test_engines_that_agree_pass_with_their_mean_difference():
    scored = SCORED.clone()
    scored[0, 2:] += torch.tensor([0.003, -0.006, 0.0])  # mean 0.003
    scored[1, 2] += 0.002  # mean 0.001 of two tokens
    metrics = CANARY.check(NAMES, SAMPLED, scored, version=8)
    total, count = metrics["sync/canary_logprob_diff"]
    assert (total, count) == (pytest.approx(0.004, rel=1e-3), 2)


def test_an_engine_that_disagrees_is_named_with_what_to_look_at():
    scored = SCORED.clone()
    scored[1, 2:4] += 0.02  # the mean is over its own two tokens, not over the padding
    with pytest.raises(SyncError) as error:
        CANARY.check(NAMES, SAMPLED, scored, version=8)
    for part in ("engine 1 at weight version 8", "2.00e-02", "weight_sync.canary_tolerance is 0.01", "rollout.dtype"):
        assert part in str(error.value)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_log_prob_that_is_no_number_is_no_agreement(bad):
    scored = SCORED.clone()
    scored[0, 3] = bad
    with pytest.raises(SyncError, match="engine 0"):
        CANARY.check(NAMES, SAMPLED, scored, version=8)


def test_what_stands_on_prompt_and_padding_does_not_matter():
    scored = SCORED.clone()
    scored[:, :2], scored[1, 4] = 99.0, 99.0
    CANARY.check(NAMES, SAMPLED, scored, version=8)


def test_an_engine_with_another_version_is_told_apart_from_one_that_disagrees():
    with pytest.raises(SyncError, match="engine 0 serves weight version 8, not 9"):
        CANARY.check(NAMES, SAMPLED, SCORED, version=9)


def test_an_engine_that_sampled_nothing_proves_nothing():
    empty = Trajectory([3, 4], [], [], [], 0.0, 0, 8, "abort")
    with pytest.raises(SyncError, match="engine 0"):
        CANARY.check(["engine 0"], [empty], torch.zeros(1, 2), version=8)


class FakeEngine:
    def sample(self, prompt_ids, num_tokens, temperature):
        assert (prompt_ids, num_tokens, temperature) == ([3, 4], 3, 0.7)
        return Completion([5, 6, 7], [-1.0, -2.0, -3.0], "length", 8)


def test_a_sample_of_an_engine_is_what_the_trainer_scores():
    assert CANARY.sample(FakeEngine()) == SAMPLED[0]


def test_a_canary_fits_the_run_and_is_the_same_on_every_rank():
    knobs = {"temperature": 1.0, "tolerance": 1e-4}
    made = make_canary(50, max_prompt=9, max_response=5, seed=1, **knobs)
    assert len(made.prompt_ids) == 9 and made.num_tokens == 5
    assert all(0 <= token < 50 for token in made.prompt_ids)
    assert made == make_canary(50, max_prompt=9, max_response=5, seed=1, **knobs)
    assert made != make_canary(50, max_prompt=9, max_response=5, seed=2, **knobs)
    long = make_canary(50, max_prompt=4096, max_response=4096, seed=1, **knobs)
    assert (len(long.prompt_ids), long.num_tokens) == (16, 32)  # a probe, not a benchmark
