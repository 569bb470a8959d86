"""Faults at random all through a run: what becomes of its prompts, the age of its tokens, and what it learns.

  python -m benchmarks.soak --json benchmarks/results/soak.json
  python -m benchmarks.soak --staleness 1 --steps 40 --every 10

Runs configs/quickstart_async.yaml twice for each --staleness: undisturbed, and with its engine killed, stopped, paused
and slowed down at random moments (benchmarks/faults.py). Every batch that was trained on is kept and compared:

lost, twice  prompts of a step of the undisturbed run that the other run did not train on in that step, and prompts it
             trained on more than once in a step
too old      responses begun by weights older than max_staleness allows
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults import FAULTS, server
from benchmarks.process import train
from benchmarks.record import add_results_option, provenance, write_results
from benchmarks.report import Table
from rlhf_mp.config.load import load_config
from rlhf_mp.data import step_batch
from rlhf_mp.data.step_batch import StepBatch
from rlhf_mp.observe.sinks import read_jsonl

ROLLOUT = "actor_rollout_ref.rollout"
KEPT = ("trainer.save_batches=all", "trainer.save_freq=-1", "trainer.save_hf=never", "trainer.max_engine_restarts=1000")
NOTICED = (f"{ROLLOUT}.health_check_interval_s=1", f"{ROLLOUT}.health_check_timeout_s=8")

Prompts = dict[int, Counter[tuple[int, ...]]]  # by step: how many rows each has


@dataclass
class Trouble:
    """Does something to an engine every now and then, once the first step is done."""

    run_dir: Path
    every_s: float  # on average
    draw: random.Random
    done: Counter[str] = field(default_factory=Counter)
    due: float | None = None

    def look(self) -> None:
        if self.due is None:
            metrics = self.run_dir / "metrics.jsonl"
            if not metrics.exists() or not any("time/step_s" in record for record in read_jsonl(metrics)):
                return
        elif time.monotonic() >= self.due:
            name, group = self.draw.choice(list(FAULTS)), server(self.run_dir, self.draw.randrange(self.num_engines()))
            if group is None:  # being restarted: later
                return
            self.done[name] += 1
            try:
                FAULTS[name](group)
            except ProcessLookupError:  # ended by its host meanwhile: it was found out
                pass
        else:
            return
        self.due = time.monotonic() + self.draw.expovariate(1 / self.every_s)

    def num_engines(self) -> int:
        return len([log for log in self.run_dir.glob("logs/engine_*.log") if "restart" not in log.name])


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart_async.yaml"))
    parser.add_argument("--staleness", default="0,1,4", help="values of max_staleness, two jobs each")
    parser.add_argument("--steps", type=int, default=200, help="of each job")
    parser.add_argument("--every", type=float, default=30, help="seconds between two faults, on average")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    add_results_option(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args(argv)
    found: dict[str, Any] = {"provenance": provenance(), "config": str(args.config), "steps": args.steps, "runs": []}
    for staleness in map(int, args.staleness.split(",")):
        words = [*args.overrides, f"{ROLLOUT}.max_staleness={staleness}", f"trainer.total_training_steps={args.steps}"]
        calm, expected = run(args.config, words, None, None)
        wild, prompts = run(args.config, words, args.every, args.seed)
        audit = compared(expected, prompts)
        found["runs"] += [{"max_staleness": staleness} | calm, {"max_staleness": staleness} | wild | audit]
        print(table(found["runs"][-2:]).terminal(), flush=True)
        write_results(args.json, found)
    print("\n" + table(found["runs"]).terminal())


def run(config: Path, words: Sequence[str], every_s: float | None, seed: int | None) -> tuple[dict[str, Any], Prompts]:
    """One job, disturbed or not; what came of it, and the prompts of each step."""
    loaded = load_config(config, words)
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "run"
        own = [*words, *KEPT, *NOTICED, f"trainer.default_local_dir={run_dir}"]
        trouble = Trouble(run_dir, every_s or 0, random.Random(seed))
        began = time.monotonic()
        look = trouble.look if every_s else lambda: None
        train(config, own, loaded.trainer.num_ranks, Path(scratch) / "log", look)
        seconds = time.monotonic() - began
        batches = {
            step: step_batch.read(step_batch.folder_of(run_dir, step)) for step in step_batch.kept_steps(run_dir)
        }
        records = read_jsonl(run_dir / "metrics.jsonl")
        restarts = len([*run_dir.glob("logs/engine_*_restart_*.log")])
    accuracies = [record["eval/accuracy"] for record in records if "eval/accuracy" in record]
    found = {
        "seconds": seconds,
        "steps": len(batches),
        "faults": {name: trouble.done[name] for name in FAULTS},
        "restarts": restarts,
        "accuracy_first": accuracies[0],
        "accuracy_last": accuracies[-1],
        "token_staleness_max": max(r["rollout/token_staleness_max"] for r in records if "time/step_s" in r),
        "too_old": too_old(batches, loaded.actor_rollout_ref.rollout.max_staleness),
    }
    return found, {step: prompts_of(parts) for step, parts in batches.items()}


def prompts_of(parts: Sequence[StepBatch]) -> Counter[tuple[int, ...]]:
    """How many rows of a step each prompt has. A row's prompt ends where the mask begins."""
    rows: Counter[tuple[int, ...]] = Counter()
    for part in parts:
        starts = part.batch.mask.to(int).argmax(1).tolist()
        rows.update(tuple(row[:start]) for row, start in zip(part.batch.tokens.tolist(), starts, strict=True))
    return rows


def too_old(batches: Mapping[int, Sequence[StepBatch]], max_staleness: int) -> int:
    """Responses whose first token was sampled by weights more than ``max_staleness`` versions behind the step's."""
    versions = [(step, version) for step, parts in batches.items() for part in parts for version in part.versions]
    return sum(version < step - 1 - max_staleness for step, version in versions)


def compared(expected: Prompts, found: Prompts) -> dict[str, int]:
    """Rows of prompts that a step should have had and has not, and of those that it has too many of."""
    steps = expected.keys() | found.keys()
    none: Counter[tuple[int, ...]] = Counter()
    lost = sum((expected.get(step, none) - found.get(step, none)).total() for step in steps)
    twice = sum((found.get(step, none) - expected.get(step, none)).total() for step in steps)
    return {"lost": lost, "twice": twice}


def table(runs: Sequence[Mapping[str, Any]]) -> Table:
    columns = ["seconds", "steps", "restarts", "accuracy_first", "accuracy_last", "token_staleness_max", "too_old"]
    rows = [
        [run["max_staleness"], *run["faults"].values(), *(run[column] for column in columns)]
        + [run.get("lost"), run.get("twice")]
        for run in runs
    ]
    return Table("runs with faults", ["max_staleness", *FAULTS, *columns, "lost", "twice"], rows)


if __name__ == "__main__":
    main(sys.argv[1:])
