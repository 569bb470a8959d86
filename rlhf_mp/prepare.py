"""What every rank does before anything heavy is imported: read the config, find its place, or say what is wrong."""

import os
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from rlhf_mp.cluster.launcher import RankInfo, check_meeting_point, leave_out, rank_environment, read_rank
from rlhf_mp.config.files import file_problems
from rlhf_mp.config.load import check_layers
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.errors import ConfigError
from rlhf_mp.host_allocator import use_allocator
from rlhf_mp.planner.preflight import plan_problems

EXIT_CONFIG = 2
RANK_0_FIRST_S = 5
"""A launcher ends every rank when one fails, so the silent ones wait while rank 0 says what is wrong."""


def checked_config(layers: Iterable[dict[Any, Any]], overrides: Sequence[str], world_size: int) -> RunConfig:
    """The config of a run that can start here.

    Args:
        layers: nested mappings, the most basic first.

    Raises:
        ConfigError: with the problems of values and of files together.
    """
    config, problems = check_layers(layers, overrides)
    refused = {problem.key for problem in problems}  # what stands in their place now is only a default
    problems += (problem for problem in file_problems(config, world_size) if problem.key not in refused)
    if problems:
        raise ConfigError(problems)
    return config


def prepare(layers: Iterable[dict[Any, Any]], overrides: Sequence[str] = ()) -> tuple[RunConfig, RankInfo]:
    """A config that can start here and fits, and this process's place in the job.

    Raises:
        ConfigError: with every problem; none of them has cost anything yet.
    """
    config = checked_config(layers, overrides, read_rank(os.environ).world_size)
    info = leave_out(rank_environment(), config.engine_machines)
    check_meeting_point(info)
    if info.rank == 0 and not config.trainer.skip_plan and (problems := list(plan_problems(config))):
        raise ConfigError(problems)
    use_allocator(config.trainer.host_allocator)
    return config, info


def rank_here() -> RankInfo:
    """``read_rank`` of this process, or a single one where its environment makes no sense: to say what is wrong."""
    try:
        return read_rank(os.environ)
    except ConfigError:
        return RankInfo(rank=0, local_rank=0, world_size=1, local_world_size=1)


def tell(error: ConfigError) -> int:
    """Print what is wrong, once on every machine. Returns the exit code."""
    info = rank_here()
    if info.rank != 0:
        time.sleep(RANK_0_FIRST_S)
    if info.rank == 0 or (info.local_rank == 0 and info.several_hosts):  # another machine may lack a file
        print(f"{socket.gethostname()}: {error}" if info.several_hosts else error, file=sys.stderr)
    return EXIT_CONFIG
