import os

import pytest
from guarded import Job


@pytest.fixture
def new_job(tmp_path):
    jobs = []

    def start(num_ranks: int = 1) -> Job:
        jobs.append(Job(tmp_path / f"run_{len(jobs)}", 20000 + os.getpid() % 20000 + len(jobs), num_ranks))
        return jobs[-1]

    yield start
    for job in jobs:
        job.stop()
