"""How soon each algorithm learns the quickstart's task: steps and seconds to an accuracy on held-out additions.

  python -m benchmarks.algorithms --json benchmarks/results/algorithms.json --markdown docs/algorithms_measured.md
  python -m benchmarks.algorithms --only grpo,gspo --steps 20 --test-freq 10

Every run is `deepspeed launch/train.py --config configs/quickstart.yaml` with the words of its row and nothing else
changed, one after the other on the same cores. Accuracy is greedy, measured every --test-freq steps; a run is stopped
once it is there, or at --steps. An interrupted benchmark continues: runs that are in --json are not repeated.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.process import train
from benchmarks.record import add_results_option, provenance, write_results
from rlhf_mp.observe.sinks import read_jsonl

ROOT = Path(__file__).parents[1]
NUM_RANKS = 2
CONFIG = "configs/quickstart.yaml"
ACTOR = "actor_rollout_ref.actor"

ALGORITHMS = {  # name: words after the config
    "grpo": "",
    "rloo": "algorithm.adv_estimator=rloo",
    "reinforce++": "algorithm.adv_estimator=reinforce_plus_plus",
    "dr_grpo": f"algorithm.adv_estimator=dr_grpo {ACTOR}.loss_agg_mode=seq-mean-token-sum",
    "gspo": f"{ACTOR}.policy_loss=gspo {ACTOR}.loss_agg_mode=seq-mean-token-mean",
    "cispo": f"{ACTOR}.policy_loss=cispo",
    "dapo": f"{ACTOR}.use_kl_loss=false algorithm.filter_groups.enable=true "
    "reward.overlong_buffer.enable=true reward.overlong_buffer.len=4",
    "ppo": "algorithm.adv_estimator=gae critic.optim.lr=1e-3",
}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"some of {','.join(ALGORITHMS)}")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--test-freq", type=int, default=10, help="steps between two validations")
    parser.add_argument("--accuracy", type=float, default=0.9, help="what counts as learned")
    add_results_option(parser, "; runs that are there already are kept")
    parser.add_argument("--markdown", type=Path, help="where the table goes")
    args = parser.parse_args(argv)
    chosen = args.only.split(",") if args.only else list(ALGORITHMS)
    if unknown := set(chosen) - set(ALGORITHMS):
        parser.error(f"--only: no {', '.join(sorted(unknown))}; there are {', '.join(ALGORITHMS)}")
    found = json.loads(args.json.read_text()) if args.json and args.json.exists() else {"runs": {}}
    measured_on = provenance()
    found.setdefault("provenance", measured_on)  # of the runs, where none is made now
    prepare()
    for name in chosen:
        if name in found["runs"]:
            continue
        print(f"{name}: at most {args.steps} steps", flush=True)
        found["runs"][name] = measure(name, args.steps, args.test_freq, args.accuracy)
        found["provenance"] = measured_on
        write_results(args.json, found)
    text = table(found["runs"], args.accuracy)
    print("\n" + text)
    if args.markdown:
        args.markdown.write_text(page(text, found["provenance"], args.accuracy))


def prepare() -> None:
    """Make the quickstart's model and data unless they are there."""
    from rlhf_mp.quickstart import main as make_quickstart

    make_quickstart(["--out", str(ROOT / "runs" / "quickstart")])


def measure(name: str, steps: int, test_freq: int, accuracy: float) -> dict[str, Any]:
    """One run in a folder of its own, and what it says about learning."""
    with tempfile.TemporaryDirectory() as scratch:
        words = [*ALGORITHMS[name].split(), f"trainer.total_training_steps={steps}", f"trainer.test_freq={test_freq}"]
        words += ["trainer.best_metric=eval/accuracy", f"trainer.stop_at={accuracy}"]
        words += ["trainer.save_freq=-1", "trainer.save_hf=never", f"trainer.default_local_dir={scratch}/run"]
        train(ROOT / CONFIG, words, NUM_RANKS, Path(scratch) / "log.txt")
        return summarize(read_jsonl(Path(scratch) / "run" / "metrics.jsonl"), accuracy)


def learned(records: Sequence[Mapping[str, Any]], accuracy: float) -> int | None:
    """The first step after which the held-out accuracy was ``accuracy``, if any."""
    return next((record["step"] for record in records if record.get("eval/accuracy", -1) >= accuracy), None)


def summarize(records: Sequence[Mapping[str, Any]], accuracy: float) -> dict[str, Any]:
    """When the accuracy was first reached, and at the end. Seconds are of steps alone, without validations."""
    seconds = {0: 0.0}
    for record in records:
        if "time/step_s" in record:
            seconds[record["step"]] = seconds[record["step"] - 1] + record["time/step_s"]
    curve = [(record["step"], record["eval/accuracy"]) for record in records if "eval/accuracy" in record]
    reached = learned(records, accuracy)
    rewards = [record["rollout/reward_mean"] for record in records if "rollout/reward_mean" in record]
    last = max(seconds)
    return {
        "steps": last,
        "seconds": seconds[last],
        "seconds_per_step": seconds[last] / last,
        "steps_to_accuracy": reached,
        "seconds_to_accuracy": None if reached is None else seconds[reached],
        "accuracy_first": curve[0][1],
        "accuracy_last": curve[-1][1],
        "reward_first": rewards[0],
        "reward_last": rewards[-1],
        "curve": curve,
    }


def table(runs: Mapping[str, Mapping[str, Any]], accuracy: float) -> str:
    """Markdown: one row per algorithm, in the order of ALGORITHMS."""
    head = (
        f"| algorithm | steps to {accuracy:g} | seconds to {accuracy:g} | s/step | accuracy before | after | of steps |"
    )
    lines = [head, "|---|---:|---:|---:|---:|---:|---:|"]
    for name in ALGORITHMS:
        if name in runs:
            run = runs[name]
            reached = run["steps_to_accuracy"] is not None
            steps = str(run["steps_to_accuracy"]) if reached else "not yet"
            seconds = f"{run['seconds_to_accuracy']:.0f}" if reached else "-"
            lines.append(
                f"| {name} | {steps} | {seconds} | {run['seconds_per_step']:.2f} | {run['accuracy_first']:.3f} | "
                f"{run['accuracy_last']:.3f} | {run['steps']} |"
            )
    return "\n".join(lines)


def page(text: str, measured_on: Mapping[str, Any], accuracy: float) -> str:
    words = "\n".join(f"- {name}: `{words or 'as it is'}`" for name, words in ALGORITHMS.items())
    return PAGE.format(accuracy=accuracy, words=words, table=text, config=CONFIG, **measured_on)


PAGE = """# Algorithms on the quickstart's task

Made by `python -m benchmarks.algorithms`, {date}, commit `{git_commit}`,
on {machine[num_cores]} cores of {machine[cpu]}.
Steps and seconds of training until the greedy accuracy on held-out additions is {accuracy:g}; `{config}` with only
these words changed, the same learning rate and seed for all:

{words}

{table}
"""


if __name__ == "__main__":
    main(sys.argv[1:])
