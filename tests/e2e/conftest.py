"""A model and data small enough for many jobs, and a way to start them that cleans up after a failed test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from additions import make_inputs
from job import Job


@pytest.fixture(scope="session")
def inputs(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return make_inputs(tiny_checkpoint, tmp_path_factory.mktemp("inputs"))


ONE_RANK = [
    "actor_rollout_ref.actor.strategy=torch",
    "actor_rollout_ref.actor.fsdp_config.param_offload=false",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=false",
]


@pytest.fixture(scope="module")
def start(inputs: list[str]) -> Iterator[Callable[..., Job]]:
    """``start(run_dir, *overrides, num_ranks=1)``: DeepSpeed with several ranks, plain torch with one."""
    jobs = []

    def start_job(run_dir: Path, *overrides: str, num_ranks: int = 1, **options) -> Job:
        own = ONE_RANK if num_ranks == 1 else []
        jobs.append(Job(run_dir, *inputs, *own, *overrides, num_ranks=num_ranks, **options))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.stop()
