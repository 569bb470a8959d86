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
import sys
from pathlib import Path

from rlhf_mp.config.files import file_problems
from rlhf_mp.config.load import read_config
from rlhf_mp.config.summary import describe_run
from rlhf_mp.config.yaml_file import read_layers
from rlhf_mp.errors import Absent, ConfigError
from rlhf_mp.planner.disk import describe_disk
from rlhf_mp.planner.preflight import plan_of
from rlhf_mp.planner.report import describe
from rlhf_mp.prepare import prepare, rank_here, tell


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="a YAML file, see configs/")
    parser.add_argument("--check", action="store_true", help="report every problem or print the resolved run, and stop")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # the deepspeed launcher adds it
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. actor_rollout_ref.rollout.n=16")
    return parser.parse_intermixed_args(argv)


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
    plan = plan_of(config)
    memory = f"# memory\n{describe(plan)}\n{describe_disk(config, plan.job)}\n"
    return "\n".join([*parts, memory, describe_run(config)])


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    try:
        if args.check:
            text = check(args.config, args.overrides)
            if rank_here().rank == 0:
                print(text)
            return 0
        config, info = prepare(read_layers(args.config), args.overrides)
    except ConfigError as error:
        return tell(error)
    from rlhf_mp.run import run  # heavy imports start here

    return run(config, info)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
