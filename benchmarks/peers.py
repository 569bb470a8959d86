"""The same GRPO job in TRL's GRPOTrainer and in rlhf_mp, one after the other on the same cores.

  python -m benchmarks.peers --workload quickstart --steps 30
  python -m benchmarks.peers --workload all --steps 5 --json benchmarks/results/peers.json

Both get the same model folder, the same prompts in the same order, the same reward, sampling, loss and number of
optimizer steps, in float32. What only concerns speed is each side's own affair: a few settings are tried for
PROBE_STEPS steps each, and the fastest runs in full. TRL's environment is made on demand in .venv-trl.
"""

import argparse
import dataclasses
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.record import add_results_option, provenance, write_results
from benchmarks.rlhf_mp_side import RlhfMpSide
from benchmarks.trl_side import TrlSide
from benchmarks.workloads import WORKLOADS, Material, Workload
from rlhf_mp.observe.sinks import read_jsonl

PROBE_STEPS = 2  # the first warms up
REWARD_WINDOW = 5  # steps whose mean is "the reward after N steps"
PHASES = ("rollout", "score", "train", "sync")
QUICKSTART, REALISTIC = Path("runs/quickstart"), Path("runs/peers/realistic")

Record = Mapping[str, Any]
"""One training step, in rlhf_mp's metric names, whoever wrote it."""


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=[*WORKLOADS, "all"], default="all")
    parser.add_argument("--steps", type=int, default=10, help="rollouts per side, at least 2: the first warms up")
    add_results_option(parser)
    parser.add_argument("--keep", type=Path, help="folder for configs, logs and metrics; unset: a temporary one")
    args = parser.parse_args(argv)
    if args.steps < 2:
        parser.error("--steps: at least 2, because the first warms up")
    if args.keep and args.keep.exists():
        parser.error(f"--keep: {args.keep} exists already; name a new folder")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # unwinds: the running side is ended too
    chosen = list(WORKLOADS.values()) if args.workload == "all" else [WORKLOADS[args.workload]]
    with tempfile.TemporaryDirectory() as scratch:
        results = compare(chosen, args.steps, args.keep or Path(scratch))
    for workload in chosen:
        print("\n" + table(workload, args.steps, results["workloads"][workload.name]["sides"]))
    write_results(args.json, results)


def compare(workloads: Sequence[Workload], steps: int, folder: Path) -> dict[str, Any]:
    """Everything a reader needs to judge the comparison, and to repeat it."""
    measured_on = provenance()
    trl = TrlSide()
    results: dict[str, Any] = {"provenance": measured_on | {"trl_versions": trl.versions()}, "workloads": {}}
    for workload in workloads:
        material = prepare(workload)
        results["workloads"][workload.name] = {
            "workload": dataclasses.asdict(workload),
            "steps": steps,
            "sides": {side.name: measure(side, workload, material, steps, folder) for side in (trl, RlhfMpSide())},
        }
    return results


def prepare(workload: Workload) -> Material:
    """Make the workload's model and prompts unless they are there."""
    if workload.name == "quickstart":
        from rlhf_mp.quickstart import main as make_quickstart

        make_quickstart(["--out", str(QUICKSTART)])
        folder = QUICKSTART
    else:
        from benchmarks.spread_model import build

        folder = REALISTIC
        if not (folder / "train.jsonl").exists():  # written last
            build(folder)
    return Material(folder / "model", folder / "train.jsonl")


def measure(side, workload: Workload, material: Material, steps: int, folder: Path) -> dict[str, Any]:
    """Try every variant briefly, then run the fastest for ``steps`` steps."""

    def folder_of(variant, kind: str) -> Path:
        return folder / workload.name / side.name / f"{kind}-{variant.name}"

    def run(workload: Workload, variant, steps: int, kind: str) -> list[Record]:
        out = folder_of(variant, kind)
        out.mkdir(parents=True)
        prompts = workload.prompts_per_step
        print(f"{workload.name}: {side.name} {variant.name}, {steps} steps of {prompts} prompts", flush=True)
        return training_steps(read_jsonl(side.run(workload, variant, material, steps, out)))

    small, probes = workload.probe(), {}
    for variant in side.variants(workload):
        probes[variant] = run(small, variant, PROBE_STEPS, "probe")[-1]["time/step_s"]
    fastest = min(probes, key=probes.__getitem__)
    records = run(workload, fastest, steps, "full")
    return {
        "variant": dataclasses.asdict(fastest) | {"name": fastest.name},
        "settings": side.settings(workload, fastest, material, steps, folder_of(fastest, "full")),
        "probes_s_per_step": {variant.name: seconds for variant, seconds in probes.items()},
        "summary": summarize(records),
        "records": records,
    }


def training_steps(records: Sequence[Record]) -> list[Record]:
    """Without validations, which are lines of their own."""
    return [record for record in records if "time/step_s" in record]


def summarize(records: Sequence[Record]) -> dict[str, float]:
    """Speed over all steps but the first, which warms up; reward over all.

    ``<phase>_s`` are means and add up, with ``other_s``, to ``step_mean_s``. Tokens are generated tokens, over the
    whole step and over the rollout alone.
    """
    steady = records[1:]
    seconds = [record["time/step_s"] for record in steady]
    tokens = sum(record["rollout/response_tokens"] for record in steady)
    phases = {f"{phase}_s": mean(record[f"time/{phase}_s"] for record in steady) for phase in PHASES}
    rewards = [record["rollout/reward_mean"] for record in records]
    return {
        "step_median_s": median(seconds),
        "step_mean_s": mean(seconds),
        "step_min_s": min(seconds),
        "step_max_s": max(seconds),
        **phases,
        "other_s": mean(seconds) - sum(phases.values()),
        "tokens_per_s": tokens / sum(seconds),
        "rollout_tokens_per_s": tokens / sum(record["time/rollout_s"] for record in steady),
        "response_tokens_mean": tokens / len(steady),
        "reward_first": rewards[0],
        "reward_last": mean(rewards[-REWARD_WINDOW:]),
    }


ROWS = {  # label: (key, format)
    "seconds per step (median)": ("step_median_s", "{:.2f}"),
    "generated tokens/s": ("tokens_per_s", "{:.0f}"),
    "  within the rollout": ("rollout_tokens_per_s", "{:.0f}"),
    "tokens generated per step": ("response_tokens_mean", "{:.0f}"),
    "reward at step 1": ("reward_first", "{:.3f}"),
    f"reward, last {REWARD_WINDOW} steps": ("reward_last", "{:.3f}"),
    "mean seconds per step": ("step_mean_s", "{:.2f}"),
    **{f"  {phase}": (f"{phase}_s", "{:.2f}") for phase in (*PHASES, "other")},
}


def table(workload: Workload, steps: int, sides: Mapping[str, Mapping[str, Any]]) -> str:
    """One column per side, then where each side's time goes."""
    width = 2 + max(24, *(len(side["variant"]["name"]) for side in sides.values()))
    title = (
        f"{workload.name}: {workload.prompts_per_step} prompts x {workload.group_size} responses of up to "
        f"{workload.max_response_tokens} tokens, {workload.minibatches} optimizer steps; {steps} steps, float32"
    )
    lines = [title, " " * 28 + "".join(f"{name:>{width}}" for name in sides)]
    lines.append(f"{'fastest setting':28}" + "".join(f"{side['variant']['name']:>{width}}" for side in sides.values()))
    for label, (key, form) in ROWS.items():
        lines.append(f"{label:28}" + "".join(f"{form.format(s['summary'][key]):>{width}}" for s in sides.values()))
    lines += [f"{name}: {where_time_goes(side['summary'])}" for name, side in sides.items()]
    return "\n".join(lines)


def where_time_goes(summary: Mapping[str, float]) -> str:
    """Shares of a step, largest first, e.g. "train 61%, rollout 30%"."""
    shares = {phase: summary[f"{phase}_s"] / summary["step_mean_s"] for phase in (*PHASES, "other")}
    ranked = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{phase} {share:.0%}" for phase, share in ranked if share >= 0.005)


if __name__ == "__main__":
    main(sys.argv[1:])
