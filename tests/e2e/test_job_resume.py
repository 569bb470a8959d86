"""Four steps, a stop and four more are eight steps, bit for bit. Two DeepSpeed ranks, ZeRO-3 with both offloads."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from job import ENGINE_ROUNDING, Job
from safetensors.torch import load_file

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]
COMPARED = ("rollout/", "actor/", "eval/", "score/")
"""Metrics of what was computed; the others, and all in seconds, are times and memory."""


class Runs(NamedTuple):
    straight: Job
    resumed: Job


@pytest.fixture(scope="module")
def runs(start, tmp_path_factory) -> Runs:
    folder = tmp_path_factory.mktemp("resume")

    def finished(name: str, num_steps: int) -> Job:
        job = start(folder / name, f"trainer.total_training_steps={num_steps}", "trainer.test_freq=4", num_ranks=2)
        assert job.wait() == 0, job.output()
        job.assert_nothing_left()
        return job

    straight = finished("straight", 8)
    finished("resumed", 4)
    return Runs(straight, finished("resumed", 8))


def is_compared(name: str) -> bool:
    if name.endswith("_s") or name.startswith(ENGINE_ROUNDING):
        return False
    return name == "step" or name.startswith(COMPARED)


def weights(job: Job) -> dict[str, torch.Tensor]:
    (file,) = (job.run_dir / "huggingface").glob("model*.safetensors")
    return load_file(file)


def test_the_second_start_continues_from_the_checkpoint(runs):
    assert f"resumed from {runs.resumed.run_dir}/checkpoints/global_step_000004 at step 4" in runs.resumed.output()
    assert list(runs.resumed.steps()) == list(range(1, 9))


def test_weights_are_equal_bit_for_bit(runs, inputs):
    straight, resumed = weights(runs.straight), weights(runs.resumed)
    assert straight.keys() == resumed.keys()
    different = [name for name in straight if not straight[name].equal(resumed[name])]
    assert different == []
    start = load_file(Path(inputs[0].partition("=")[2]) / "model.safetensors")
    unchanged = [name for name in start if start[name].equal(straight[name])]
    assert unchanged == []


def test_rewards_and_losses_of_every_step_are_equal(runs):
    straight, resumed = (
        [{k: v for k, v in record.items() if is_compared(k)} for record in job.metrics()] for job in runs
    )
    assert straight == resumed
    assert len({record["actor/loss"] for record in runs.straight.steps().values()}) == 8


def test_a_changed_data_file_is_named_and_ends_the_resume(runs, start, inputs):
    (train,) = (Path(word.partition("=")[2]) for word in inputs if word.startswith("data.train_files="))
    before = train.read_text()
    train.write_text(before + before.splitlines()[0] + "\n")
    try:
        job = start(runs.resumed.run_dir, "trainer.total_training_steps=9", num_ranks=2)
        assert job.wait() == 1
    finally:
        train.write_text(before)
    assert "data.train_files are not those of the checkpoint" in job.output()
    assert f"{train} has changed: {len(before)} bytes then" in job.output()
    job.assert_nothing_left()
