"""Sampling ahead on cores of its own, with stragglers aborted and a resume: a real job."""

import os
from pathlib import Path

import pytest
from job import Job

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a rank and an engine need a core each"),
]
AHEAD = 2
LONG = [  # responses long enough for swaps to come in their middle
    "data.max_response_length=48",
    "data.train_batch_size=16",
    f"actor_rollout_ref.rollout.max_staleness={AHEAD}",
    "actor_rollout_ref.rollout.over_sample_rate=0.25",
    "trainer.save_freq=2",
    "trainer.test_freq=4",
]
ENDED_BY_STEP_8 = ["trainer.best_metric=eval/accuracy", "trainer.stop_at=0"]  # the first validation after the resume


@pytest.fixture(scope="module")
def job(start, inputs, tmp_path_factory) -> Job:
    folder = tmp_path_factory.mktemp("async") / "run"
    own = [f"trainer.{key}" for key in ("placement=disjoint", "device=cpu")]
    first = start(folder, *own, *LONG, "trainer.total_training_steps=4")
    assert first.wait() == 0, first.output()
    first.assert_nothing_left()
    second = start(folder, *own, *LONG, *ENDED_BY_STEP_8, "trainer.total_training_steps=12")
    assert second.wait() == 0, second.output()
    second.assert_nothing_left()
    return second


def test_all_steps_are_there_and_no_token_is_older_than_allowed(job):
    steps = job.steps()
    assert list(steps) == list(range(1, 9))
    staleness = [record["rollout/token_staleness_max"] for record in steps.values()]
    assert max(staleness) <= AHEAD
    assert max(staleness) > 0  # something was sampled ahead
    assert steps[1]["rollout/token_staleness_max"] == 0  # there was no earlier version
    assert steps[5]["rollout/token_staleness_max"] == 0  # nor one that the resumed run knew


def test_a_good_enough_validation_ends_a_run_whose_engines_are_ahead(job):
    summary = job.summary()
    assert summary["best"]["step"] == 8 and summary["num_steps"] == 8
    assert Path(summary["paths"]["checkpoint"]).name == "global_step_000008"
    assert Path(summary["paths"]["hf"], "config.json").exists()


def test_every_step_tells_who_waited_and_what_was_aborted(job):
    for record in job.steps().values():
        assert record["rollout/aborted_groups"] == 4  # a quarter of 16
        assert record["queue/ranks_waited_s"] >= 0 and record["queue/engines_idle_s"] >= 0
        assert 0 <= record["queue/steps_ready"] <= AHEAD
        assert 0 < record["actor/correction_weight"] <= 2  # truncated at the threshold
        assert record["sync/canary_logprob_diff"] < 1e-4
