"""What is left of a run: ``summary.json``, and the table printed at its end."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_mp.observe.console import duration
from rlhf_mp.observe.machine import git_commit, machine, versions
from rlhf_mp.observe.plan_check import compare
from rlhf_mp.phase import Phase

Record = Mapping[str, Any]
"""A line of metrics.jsonl: ``step``, ``wall_time`` and metrics by name."""

BEFORE_AFTER = {
    "validation accuracy": "eval/accuracy",
    "validation reward": "eval/reward_mean",
    "training reward": "rollout/reward_mean",
    "validation loss": "eval/loss",
    "training loss": "train/loss",
}
FOLLOWED = {"rollout/reward_mean", "train/loss"}  # and whatever a validation measures


def write_summary(
    path: Path,
    records: Sequence[Record],
    *,
    config: Mapping[str, Any],
    paths: Mapping[str, str],
    best: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write ``summary.json`` whole or not at all, and return it.

    Args:
        records: the run's metrics.jsonl, see ``read_jsonl``; steps before a resume count too.
        config: the resolved configuration.
        paths: what the run left behind, by name: tensorboard, checkpoint, hf.
        best: metric, mode, value and step of the best validation, where one was looked for.
    """
    summary = {
        **results(records),
        "best": None if best is None else dict(best),
        "memory": compare(records),
        "paths": dict(paths),
        "versions": versions(),
        "git_commit": git_commit(),
        "machine": machine(),
        "config": dict(config),
    }
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps(summary, indent=2) + "\n")
    os.replace(unfinished, path)
    return summary


def results(records: Sequence[Record]) -> dict[str, Any]:
    """How many steps, how long and how fast, and every validation metric and the reward, first and last."""
    steps = [record for record in records if "time/step_s" in record]
    evals = [record for record in records if "time/eval_s" in record]
    found: dict[str, Any] = {
        "num_steps": len(steps),
        "seconds": sum(record["time/step_s"] for record in steps) + sum(record["time/eval_s"] for record in evals),
        "phases": {name: timing for name in ("step", *(p.value for p in Phase)) if (timing := _timing(steps, name))},
    }
    followed = {name for record in records for name in record if name.startswith("eval/")} | FOLLOWED
    for name in sorted(followed):
        values = [record[name] for record in records if name in record]
        if values:
            found[f"{name}_first"], found[f"{name}_last"] = values[0], values[-1]
    return found


def _timing(steps: Sequence[Record], phase: str) -> dict[str, float]:
    """Seconds and tokens per second of a phase; empty if it never ran.

    The first step warms up caches and compiles, so it stands apart from the mean, unless it is the only one.
    Tokens per second are all tokens over all seconds, not a mean of rates.
    """
    seconds = f"time/{phase}_s"
    rate = "throughput/tokens_per_s" if phase == "step" else f"throughput/{phase}_tokens_per_s"
    ran = [record for record in steps if seconds in record]
    if not ran:
        return {}
    steady = ran[1:] or ran
    total = sum(record[seconds] for record in steady)
    timing = {"first_s": ran[0][seconds], "mean_s": total / len(steady)}
    if all(rate in record for record in steady):
        timing["tokens_per_s"] = sum(record[rate] * record[seconds] for record in steady) / total
    return timing


def before_after_table(summary: Mapping[str, Any]) -> str:
    """What training changed, what it took and where to look."""
    lines = [f"{'':20}  {'before':>8}  {'after':>8}"]
    files = {  # several validation files have an accuracy each
        f"  {name.removeprefix('eval/').removesuffix('/accuracy')}": name
        for name in (key.removesuffix("_first") for key in summary)
        if name.startswith("eval/") and name.endswith("/accuracy") and name not in BEFORE_AFTER.values()
    }
    first, *others = BEFORE_AFTER.items()
    for label, name in (first, *files.items(), *others):
        if f"{name}_first" in summary:
            lines.append(f"{label:20}  {summary[f'{name}_first']:8.3f}  {summary[f'{name}_last']:8.3f}")
    facts = {"steps": str(summary["num_steps"]), "time": duration(summary["seconds"])}
    if (best := summary["best"]) and best["step"] is not None:
        facts["best validation"] = f"{best['metric']} {best['value']:.3f} at step {best['step']}"
    if "step" in summary["phases"]:
        step = summary["phases"]["step"]
        facts["time"] += f" ({step['mean_s']:.1f} s/step)"
        train = summary["phases"].get("train", {})
        rates = [phase["tokens_per_s"] for phase in (step, train) if "tokens_per_s" in phase]
        if rates:  # a task that samples nothing has a rate of training alone
            facts["tokens/s"] = f"{rates[0]:.0f}"
    lines.append("")
    lines += [f"{label:20}  {value}" for label, value in (facts | dict(summary["paths"])).items()]
    return "\n".join(lines)
