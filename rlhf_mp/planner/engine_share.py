"""How much of a GPU its engine may take, and must."""

from dataclasses import replace

from rlhf_mp.planner.job import Job
from rlhf_mp.planner.plan import make_plan

PERCENT = range(1, 100)


def safe_shares(job: Job) -> tuple[float, float] | None:
    """The smallest and the largest ``gpu_memory_utilization`` with which the whole step fits; None: no value does.

    Less leaves no room for one sequence in the cache, more none for the trainer.
    """
    assert job.engine is not None
    tried = (replace(job, engine=replace(job.engine, memory_fraction=percent / 100)) for percent in PERCENT)
    fitting = [own.engine.memory_fraction for own in tried if make_plan(own).fits]
    return (fitting[0], fitting[-1]) if fitting else None
