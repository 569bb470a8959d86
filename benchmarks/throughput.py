"""The four headline rows (3B on 4, 8B on 8, 32B on 16, 70B on 32 GPUs): planned everywhere, measured where they fit.

  python -m benchmarks.throughput --json benchmarks/results/throughput.json

Where the GPUs of this machine are enough, the real trainer runs some steps of the row's config. A row over several
machines is started on each of them as any run is (docs/architecture.md, "Who runs"); hand its run directory in by
``--run 32B=runs/gsm8k/qwen2.5_32b`` and its summary fills the row.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.process import train
from benchmarks.record import add_results_option, provenance, write_results
from benchmarks.report import Table
from rlhf_mp.config.load import load_config
from rlhf_mp.planner.hardware import find_gpu
from rlhf_mp.planner.preflight import Machine, plan_of
from rlhf_mp.planner.throughput import step_time

CONFIGS = Path(__file__).parents[1] / "configs"
ASSUMED = "h100"  # the document does not name the card


@dataclass(frozen=True)
class Row:
    """As document 003 prints it."""

    size: str
    config: str
    num_gpus: int
    printed_tokens_per_s: float


ROWS = (
    Row("3B", "grpo_qwen2.5_3b_deepspeed", 4, 15000),
    Row("8B", "grpo_llama3.1_8b_deepspeed", 8, 8000),
    Row("32B", "grpo_qwen2.5_32b_deepspeed", 16, 3000),
    Row("70B", "grpo_llama3.1_70b_deepspeed", 32, 1200),
)


def planned(row: Row) -> dict[str, Any]:
    plan = plan_of(load_config(CONFIGS / f"{row.config}.yaml", []), Machine(find_gpu(ASSUMED), None))
    load = plan.job.workload
    time = step_time(plan, load)
    return {
        "fits": plan.fits,
        "peak_gib": plan.peak / 2**30,
        "seconds": time.total,
        # as runs count them: sampled ones
        "tokens_per_s": load.num_sequences * load.response_tokens / time.total,
    }


def measured(row: Row, run_dir: Path | None, steps: int) -> dict[str, Any]:
    """From a run that is there, from one started here, or why there is none."""
    if run_dir is not None:
        return of_summary(json.loads((run_dir / "summary.json").read_text()))
    config = load_config(CONFIGS / f"{row.config}.yaml", [])
    here = torch.cuda.device_count()
    if config.trainer.nnodes > 1 or here < row.num_gpus:
        return {"not_run": f"needs {row.num_gpus} GPUs, {here} are here"}
    model = Path(config.actor_rollout_ref.model.path)
    if not model.is_dir():
        return {"not_run": f"{model} is not there"}
    with tempfile.TemporaryDirectory() as folder:
        words = [
            f"trainer.default_local_dir={folder}/run",
            f"trainer.total_training_steps={steps}",
            "trainer.val_before_train=false",
            "trainer.save_hf=never",
        ]
        train(CONFIGS / f"{row.config}.yaml", words, row.num_gpus, Path(folder) / "log")
        return of_summary(json.loads((Path(folder) / "run" / "summary.json").read_text()))


def of_summary(summary: dict[str, Any]) -> dict[str, Any]:
    """Steady steps of a run: tokens sampled a second, and the highest peak of a phase."""
    step = summary["phases"]["step"]
    peaks = [
        row["measured_gib"] for row in summary["memory"] if row["what"].endswith(" peak") and "rss" not in row["what"]
    ]
    found = {"seconds": step["mean_s"], "tokens_per_s": step.get("tokens_per_s"), "machine": summary["machine"]}
    return found | {"peak_gib": max(peaks, default=None)}


def table(records: list[dict[str, Any]]) -> Table:
    rows = []
    for record in records:
        plan, real = record["planned"], record["measured"]
        rows.append(
            [
                record["size"],
                record["gpus"],
                record["printed_tokens_per_s"],
                plan["tokens_per_s"],
                real.get("tokens_per_s"),
                plan["peak_gib"],
                real.get("peak_gib"),
                real.get("not_run", ""),
            ]
        )
    columns = [
        "model",
        "GPUs",
        "printed tok/s",
        "planned tok/s",
        "measured tok/s",
        "planned GiB",
        "measured GiB",
        "not run",
    ]
    note = f"Planned on {find_gpu(ASSUMED).name} with the configs of the same names, full-length responses; a roofline."
    return Table("Throughput of the headline rows", columns, rows, note, label="model", chart="planned tok/s")


def measure(runs: dict[str, Path], steps: int) -> list[dict[str, Any]]:
    return [
        {
            "size": row.size,
            "gpus": row.num_gpus,
            "config": f"configs/{row.config}.yaml",
            "printed_tokens_per_s": row.printed_tokens_per_s,
            "planned": planned(row),
            "measured": measured(row, runs.get(row.size), steps),
        }
        for row in ROWS
    ]


def named_run(text: str) -> tuple[str, Path]:
    size, _, folder = text.partition("=")
    if size not in {row.size for row in ROWS} or not (Path(folder) / "summary.json").is_file():
        raise argparse.ArgumentTypeError(
            f"{text!r}: write SIZE=RUN_DIR with one of 3B, 8B, 32B, 70B and a finished run"
        )
    return size, Path(folder)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=named_run, action="append", default=[], metavar="SIZE=RUN_DIR")
    parser.add_argument("--steps", type=int, default=4, help="of a run that is started here; the first warms up")
    add_results_option(parser)
    args = parser.parse_args(argv)
    measured_on = provenance()
    records = measure(dict(args.run), args.steps)
    print(table(records).terminal())
    write_results(args.json, {"provenance": measured_on, "cells": records})


if __name__ == "__main__":
    main(sys.argv[1:])
