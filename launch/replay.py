"""Make one training step of a run again, from its saved batch and the weights before it, and compare.

  python launch/replay.py runs/quickstart/grpo --step 12
  deepspeed --num_gpus 2 launch/replay.py runs/quickstart/grpo --step 12
  python launch/replay.py runs/quickstart/grpo --step 12 --strategy torch

The last one on another backend: the loss, the gradient's norm and the divergences of the step's first update should be
the same. Batches lie in RUN_DIR/batches as trainer.save_batches says. Where a step had to be skipped because its loss
or gradient was no finite number, the rows and tokens where that begins are named. Words after the options are knobs,
key=value, for example the layout of --strategy megatron.

Exit code 1: the numbers differ by more than --tolerance; 2: it cannot be replayed.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from rlhf_mp.cluster.launcher import rank_environment
from rlhf_mp.config.replay import read_replay
from rlhf_mp.errors import CheckpointError, ConfigError

SAME, DIFFERENT, BAD_QUESTION = 0, 1, 2


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, help="e.g. runs/quickstart/grpo")
    parser.add_argument("--step", type=int, required=True, help="as it is numbered in the log; the first is 1")
    parser.add_argument("--strategy", choices=("torch", "deepspeed", "megatron"), help="unset: the run's own")
    parser.add_argument("--nearest", action="store_true", help="use older weights where batches between are missing")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="relative to the larger of a number and 1")
    parser.add_argument("--json", type=Path, help="write what was found there, too")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # the deepspeed launcher adds it
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    try:
        info = rank_environment()
        run = read_replay(args.run_dir, args.step, args.strategy, args.overrides, info.world_size, nearest=args.nearest)
    except ConfigError as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(error, file=sys.stderr)
        return BAD_QUESTION
    from rlhf_mp.run import quiet

    quiet()
    from rlhf_mp.cluster.ranks import leave_ranks  # heavy imports start here
    from rlhf_mp.replay import replay
    from rlhf_mp.replay_report import as_json, differences, report

    try:
        outcome = replay(run, info, say=print)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return BAD_QUESTION
    if info.rank == 0:
        print(report(run, outcome, args.tolerance))
        if args.json:
            args.json.write_text(json.dumps(as_json(outcome), indent=2))
    leave_ranks()
    return DIFFERENT if any(d > args.tolerance for d in differences(outcome).values()) else SAME


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
