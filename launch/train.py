"""Train a model by reinforcement learning, one process per GPU (or per CPU rank).

  deepspeed --num_gpus 2 launch/train.py --config configs/quickstart.yaml
  deepspeed --num_gpus 2 launch/train.py --config configs/quickstart.yaml trainer.total_training_steps=5
  srun --ntasks-per-node 8 python launch/train.py --config configs/grpo_qwen2.5_7b_deepspeed.yaml trainer.nnodes=2

See what would run, without a GPU and without starting anything:

  python launch/train.py --config configs/quickstart.yaml --check

Words after the options are knobs, key=value, and win over the file: docs/config.md lists them all.
Exit code 2: the configuration, or a file that it names, has problems; all of them are printed.
"""

import argparse
import os
import socket
import sys
import time
from pathlib import Path

from rlhf_mp.cluster.launcher import RankInfo, check_meeting_point, rank_environment, read_rank
from rlhf_mp.config.files import file_problems
from rlhf_mp.config.load import read_config
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.config.summary import describe_run
from rlhf_mp.errors import Absent, ConfigError
from rlhf_mp.planner.preflight import plan_of, plan_problems
from rlhf_mp.planner.report import describe

RANK_0_FIRST_S = 5
"""A launcher ends every rank when one fails, so the silent ones wait while rank 0 says what is wrong."""


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="a YAML file, see configs/")
    parser.add_argument("--check", action="store_true", help="report every problem or print the resolved run, and stop")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # the deepspeed launcher adds it
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. actor_rollout_ref.rollout.n=16")
    return parser.parse_intermixed_args(argv)


def checked_config(path: Path, overrides: list[str], world_size: int) -> RunConfig:
    """The config of a run that can start here.

    Raises:
        ConfigError: with the problems of values and of files together.
    """
    config, problems = read_config(path, overrides)
    refused = {problem.key for problem in problems}  # what stands in their place now is only a default
    problems += (problem for problem in file_problems(config, world_size) if problem.key not in refused)
    if problems:
        raise ConfigError(problems)
    return config


def check(path: Path, overrides: list[str]) -> str:
    """What would run and what memory it takes, on a machine that may have neither model nor data.

    Raises:
        ConfigError: a problem that another machine would have too.
    """
    config, problems = read_config(path, overrides)
    refused = {problem.key for problem in problems}
    files = [problem for problem in file_problems(config, world_size=None) if problem.key not in refused]
    if problems or not all(isinstance(problem, Absent) for problem in files):
        raise ConfigError([*problems, *files])
    absent = "".join(f"- {problem}\n" for problem in files)
    parts = [f"# not on this machine, and needed to start\n{absent}"] if absent else []
    return "\n".join([*parts, f"# memory\n{describe(plan_of(config))}\n", describe_run(config)])


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    info = RankInfo(rank=0, local_rank=0, world_size=1, local_world_size=1)
    try:
        info = read_rank(os.environ)
        if args.check:
            text = check(args.config, args.overrides)
            if info.rank == 0:
                print(text)
            return 0
        config = checked_config(args.config, args.overrides, info.world_size)
        info = rank_environment()
        check_meeting_point(info)
        if info.rank == 0 and not config.trainer.skip_plan and (problems := list(plan_problems(config))):
            raise ConfigError(problems)
    except ConfigError as error:
        if info.rank != 0:
            time.sleep(RANK_0_FIRST_S)
        if info.rank == 0 or (info.local_rank == 0 and info.several_hosts):  # another machine may lack a file
            print(f"{socket.gethostname()}: {error}" if info.several_hosts else error, file=sys.stderr)
        return 2
    from rlhf_mp.run import run  # heavy imports start here

    return run(config, info)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
