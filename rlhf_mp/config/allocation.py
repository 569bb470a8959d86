"""The config of a job whose number of machines an allocation decides."""

from collections.abc import Sequence
from pathlib import Path

from rlhf_mp.config.load import read_config
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.errors import Problem

KEY = "actor_rollout_ref.rollout.nnodes"


def read_allocated(path: Path, overrides: Sequence[str], machines: int) -> tuple[RunConfig, list[Problem]]:
    """``read_config`` with trainer.nnodes set to what is left of ``machines`` beside those of rollout.nnodes."""
    config, _ = read_config(path, overrides)
    alone = config.engine_machines
    config, problems = read_config(path, [*overrides, f"trainer.nnodes={max(1, machines - alone)}"])
    if alone >= machines:
        fix = f"at least {alone + 1} machines, or {KEY}={machines - 1}"
        problems.append(Problem(KEY, alone, f"the job has {machines} machine(s), and none is left for ranks", fix))
    return config, problems
