"""Where a training step's time goes, and what our own code adds to it.

  python -m benchmarks.step --config configs/quickstart.yaml
  python -m benchmarks.step --config configs/quickstart.yaml --steps 10 --json benchmarks/results/step.json

Starts the real job and measures in it: seconds per phase and tokens/s of whole steps, then two ratios, each from
alternating rounds in the same processes:

rollout   responses/s of our path (Ray, scheduler, rewards, partition) / of the same requests sent straight to the
          same SGLang servers. Goal: at least 0.9.
train     optimizer steps/s of our engine / of a bare DeepSpeed or Megatron loop on the same batches. Goal: at least
          0.95.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.bare_train import BARE
from benchmarks.process import run_ranks
from benchmarks.record import add_results_option, provenance, write_results
from rlhf_mp.config.load import load_config


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8, help="whole steps, at least 2: the first warms up")
    parser.add_argument("--rounds", type=int, default=6, help="alternations for each ratio, at least 2")
    add_results_option(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args(argv)
    if min(args.steps, args.rounds) < 2:
        parser.error("--steps and --rounds: at least 2, because the first of each only warms up")
    config = load_config(args.config, args.overrides)
    num_ranks, actor = config.trainer.num_ranks, config.actor_rollout_ref.actor
    if actor.strategy not in BARE:
        parser.error(f"actor.strategy={actor.strategy}: there is a bare loop of {' and '.join(BARE)} to compare with")
    if actor.strategy == "megatron" and actor.megatron.virtual_pipeline_model_parallel_size is not None:
        parser.error("actor.megatron.virtual_pipeline_model_parallel_size: the bare loop has no virtual stages")
    measured_on = provenance()
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "result.json"
        own = [
            f"trainer.default_local_dir={scratch}/run",
            f"trainer.total_training_steps={args.steps + args.rounds}",
            "trainer.resume_mode=disable",
        ]
        rank = ["benchmarks/step_rank.py", out, args.steps, args.rounds, args.config]
        run_ranks(num_ranks, Path(scratch) / "log", "--no_local_rank", *rank, *args.overrides, *own)
        results = {"config": str(args.config), "overrides": args.overrides} | json.loads(out.read_text())
    print(table(results))
    write_results(args.json, {"provenance": measured_on, **results})


def table(results: dict[str, Any]) -> str:
    """Seconds per phase, then the ratios, as a person reads them."""
    lines = [f"{'phase':10} {'s/step':>8} {'tokens/s':>10}   median of {results['steps_measured']} steps"]
    for phase, timing in results["phases"].items():
        rate = f"{timing['tokens_per_s']:10.0f}" if timing["tokens_per_s"] is not None else f"{'':10}"
        lines.append(f"{phase:10} {timing['seconds']:8.3f} {rate}")
    lines += ["", f"{'ratio':10} {'ours s':>8} {'bare s':>8} {'bare/ours':>10} {'goal':>6}   medians"]
    for name, goal in (("rollout", 0.9), ("train", 0.95)):
        ratio = results["ratios"][name]
        lines.append(f"{name:10} {ratio['ours_s']:8.3f} {ratio['bare_s']:8.3f} {ratio['ratio']:10.3f} {goal:6.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
