"""Every memory lever by itself and on top of the others: bytes at the peak, seconds a step, and the same losses.

  python -m benchmarks.memory_levers --json benchmarks/results/memory_levers.json

One model, one batch of sequences of very different lengths, a process for every row. On a GPU the allocator tells the
peak. On a CPU tensors are counted as they come and go, and the operating system tells what was resident; activations
that are offloaded stay in the same memory there, so that lever shows its cost and its losses but no saving. What ZeRO
and its offloads save is in ``benchmarks.states``.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.process import run_logged
from benchmarks.record import add_results_option, provenance, write_results

MODEL, ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"
BASE = {
    f"{MODEL}.logits_chunk_mb": 0,
    f"{MODEL}.use_remove_padding": "false",
    f"{MODEL}.enable_gradient_checkpointing": "false",
    f"{MODEL}.enable_activation_offload": "false",
    f"{ACTOR}.ppo_max_token_len_per_gpu": 2048,
}
LEVERS: dict[str, dict[str, Any]] = {
    "logits in chunks": {f"{MODEL}.logits_chunk_mb": 4},
    "no padding": {f"{MODEL}.use_remove_padding": "true"},
    "the cheap part of every layer recomputed": {
        f"{MODEL}.enable_gradient_checkpointing": "true",
        f"{MODEL}.recompute": "selective",
    },
    "every 2nd layer recomputed": {
        f"{MODEL}.enable_gradient_checkpointing": "true",
        f"{MODEL}.checkpoint_every_n_layers": 2,
    },
    "every layer recomputed": {
        f"{MODEL}.enable_gradient_checkpointing": "true",
        f"{MODEL}.checkpoint_every_n_layers": 1,
    },
    "activation offload, waiting": {
        f"{MODEL}.enable_activation_offload": "true",
        f"{MODEL}.activation_offload_layers": 0,
    },
    "activation offload by layers": {
        f"{MODEL}.enable_activation_offload": "true",
        f"{MODEL}.activation_offload_layers": 1,
    },
    "half the tokens a micro-batch": {f"{ACTOR}.ppo_max_token_len_per_gpu": 1024},
}
CUMULATIVE = (
    "logits in chunks",
    "no padding",
    "every layer recomputed",
    "activation offload by layers",
    "half the tokens a micro-batch",
)
TOLERANCE = 1e-5  # largest difference of a loss from the first row's, over all steps; float32


def cases() -> dict[str, dict[str, Any]]:
    """Name of each row and its overrides."""
    found = {"none": BASE}
    for name, lever in LEVERS.items():
        found[name] = BASE | lever
    knobs, names = dict(BASE), []
    for name in CUMULATIVE:
        knobs, names = knobs | LEVERS[name], [*names, name]
        if len(names) > 1:
            found[f"+ {name}"] = dict(knobs)
    return found


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=128, help="width of the model")
    parser.add_argument("--layers", type=int, default=6, help="its depth")
    parser.add_argument("--steps", type=int, default=3, help="timed, after the one that is counted")
    add_results_option(parser)
    args = parser.parse_args(argv)
    measured_on, rows = provenance(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", args.hidden, args.layers)
        for number, (lever, overrides) in enumerate(cases().items()):
            words = [f"{key}={value}" for key, value in overrides.items()]
            out = folder / f"{number}.json"
            case = json.dumps({"overrides": words, "model": str(folder / "model"), "steps": args.steps})
            run_logged([sys.executable, "-m", "benchmarks.memory_levers_case", case, str(out)], folder / "log", 1)
            rows.append({"lever": lever, "overrides": words} | json.loads(out.read_text()))
            rows[-1]["max_loss_difference"] = largest(rows[-1]["losses"], rows[0]["losses"])
            print(f"{lever}: {rows[-1]['peak_bytes'] / 1e6:.0f} MB", file=sys.stderr, flush=True)
    print(table(rows))
    shape = {"hidden": args.hidden, "layers": args.layers}
    write_results(args.json, {"provenance": measured_on, "model": shape, "rows": rows})
    if worst := [row["lever"] for row in rows if not row["max_loss_difference"] <= TOLERANCE]:
        raise SystemExit(f"losses differ by more than {TOLERANCE:g}: {', '.join(worst)}")


def make_model(folder: Path, hidden: int, layers: int) -> None:
    """Random weights in float32, and nothing else."""
    from transformers import AutoModelForCausalLM

    from benchmarks.memory_rung import model_config

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(model_config(hidden, layers), dtype=torch.float32).save_pretrained(folder)


def largest(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Peaks beside the first row's; rows that begin with + have all levers above that are named in them too."""
    head = f"{'lever':41} {'peak MB':>9} {'of none':>8} {'RSS MB':>8} {'s/step':>8} {'of none':>8} {'padding':>8}"
    lines = [f"{head} {'loss diff':>10}"]
    first = rows[0]
    for row in rows:
        shares = row["peak_bytes"] / first["peak_bytes"], row["seconds"] / first["seconds"]
        lines.append(
            f"{row['lever']:41} {row['peak_bytes'] / 1e6:9.0f} {shares[0]:8.0%} {row['rss_bytes'] / 1e6:8.0f} "
            f"{row['seconds']:8.2f} {shares[1]:8.0%} {row['padding']:8.0%} {row['max_loss_difference']:10.1e}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
