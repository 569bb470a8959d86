"""Can this job start? Run by train.sbatch on every node, before the ranks; says what is wrong there, exit code 2.

Where all is well the first node prints the run directory, a free port and the number of nodes that have ranks, each on
a line of its own.
"""

import argparse
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from rlhf_mp.cluster.launcher import tasks_per_node
from rlhf_mp.config.allocation import read_allocated
from rlhf_mp.config.files import file_problems
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.errors import ConfigError, Problem
from rlhf_mp.planner.preflight import plan_problems


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="as of launch/train.py")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser.parse_intermixed_args(argv)


def checked_config(path: Path, overrides: list[str], tasks: list[int]) -> RunConfig:
    """The config of a job that can start on these nodes.

    Args:
        tasks: ranks on each node, as Slurm will start them.

    Raises:
        ConfigError: with every problem of values, files, allocation and memory.
    """
    config, problems = read_allocated(path, overrides, len(tasks))
    if problems:
        raise ConfigError(problems)
    problems = [*file_problems(config, world_size=None), *task_problems(config, tasks)]
    if not problems and not config.trainer.skip_plan:
        problems = list(plan_problems(config))
    if problems:
        raise ConfigError(problems)
    return config


def task_problems(config: RunConfig, tasks: list[int]) -> Iterator[Problem]:
    wanted = config.trainer.n_gpus_per_node
    if set(tasks) != {wanted}:
        reason = f"the allocation has {','.join(map(str, tasks))} task(s) on its nodes"
        fix = f"sbatch --ntasks-per-node={wanted}, or trainer.n_gpus_per_node={tasks[0]}"
        yield Problem("trainer.n_gpus_per_node", wanted, reason, fix)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    try:
        config = checked_config(args.config, args.overrides, tasks_per_node(os.environ["RLHF_MP_TASKS"]))
    except ConfigError as error:
        print(f"{socket.gethostname()}: {error}", file=sys.stderr)
        return 2
    if os.environ["SLURM_NODEID"] == "0":
        print(f"{Path(config.trainer.default_local_dir).absolute()}\n{free_port()}\n{config.trainer.nnodes}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
