"""What sampling ahead saves: the time of an asynchronous step against what its two halves take.

  python -m benchmarks.async_step
  python -m benchmarks.async_step --staleness 0,1 --steps 30 --json benchmarks/results/async_step.json

Runs the same job (configs/quickstart_async.yaml: one rank and one engine, each on cores of its own) once for every
--staleness and tells, as medians over its steps:

step      the whole step
sampling  of it, some step's samples were being drawn (queue/sampling_s)
train     scoring and updates (time/score_s + time/train_s)
swap      weights into the engines (time/sync_s), in which neither half goes on
waited    ranks for samples (queue/ranks_waited_s)
idle      engines for a version (queue/engines_idle_s)

and step / max(sampling, train), all three of the same run. Goal with max_staleness > 0: at most 1.10.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.process import train
from benchmarks.record import add_results_option, provenance, write_results
from benchmarks.report import Table
from rlhf_mp.config.load import load_config
from rlhf_mp.observe.sinks import read_jsonl

PARTS = {
    "step": ("time/step_s",),
    "sampling": ("queue/sampling_s",),
    "train": ("time/score_s", "time/train_s"),
    "swap": ("time/sync_s",),
    "waited": ("queue/ranks_waited_s",),
    "idle": ("queue/engines_idle_s",),
}
WARM_UP = 3  # steps: the first compile, and fill the queue
GOAL = 1.10


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart_async.yaml"))
    parser.add_argument("--staleness", default="0,1,4", help="values of max_staleness, a job each")
    parser.add_argument("--steps", type=int, default=30, help=f"of each job, the first {WARM_UP} only warm up")
    add_results_option(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args(argv)
    if args.steps <= WARM_UP:
        parser.error(f"--steps: more than {WARM_UP}, because those only warm up")
    measured_on = provenance()
    runs = [measured(args.config, int(k), args.steps, args.overrides) for k in args.staleness.split(",")]
    print(table(runs).terminal())
    results = {"config": str(args.config), "overrides": args.overrides, "steps": args.steps, "runs": runs}
    write_results(args.json, {"provenance": measured_on, **results})


def measured(config: Path, staleness: int, num_steps: int, overrides: Sequence[str]) -> dict[str, Any]:
    """One job's medians."""
    num_ranks = load_config(config, overrides).trainer.num_ranks
    with tempfile.TemporaryDirectory() as scratch:
        own = [
            f"actor_rollout_ref.rollout.max_staleness={staleness}",
            f"trainer.default_local_dir={scratch}/run",
            f"trainer.total_training_steps={num_steps}",
            "trainer.val_before_train=false",
            "trainer.test_freq=-1",
            "trainer.save_freq=-1",
            "trainer.save_hf=never",
            "data.val_files=[]",
        ]
        train(config, [*overrides, *own], num_ranks, Path(scratch) / "log")
        records = [r for r in read_jsonl(Path(scratch) / "run" / "metrics.jsonl") if "time/step_s" in r]
    return {"max_staleness": staleness} | medians(records[WARM_UP:])


def medians(records: Sequence[dict[str, float]]) -> dict[str, float]:
    """Seconds of each part, and how far the step is from the longer half, step by step."""
    seconds = {part: [sum(r[name] for name in names) for r in records] for part, names in PARTS.items()}
    ratios = [
        step / max(halves) for step, *halves in zip(*(seconds[p] for p in ("step", "sampling", "train")), strict=True)
    ]
    found = {part: statistics.median(values) for part, values in seconds.items()}
    return found | {
        "ratio": statistics.median(ratios),
        "token_staleness": statistics.fmean(r["rollout/token_staleness_mean"] for r in records),
        "steps": len(records),
    }


def table(runs: Sequence[dict[str, Any]]) -> Table:
    columns = ["max_staleness", *PARTS, "ratio", "token_staleness"]
    rows = [[run[column] for column in columns] for run in runs]
    return Table("asynchronous steps", [*columns[:-2], f"step/max(sampling,train), goal {GOAL:.2f}", columns[-1]], rows)


if __name__ == "__main__":
    main(sys.argv[1:])
