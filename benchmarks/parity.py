"""Do the backends compute the same? Losses, gradient norms and weights over ten GRPO updates, layout by layout.

  python -m benchmarks.parity
  python -m benchmarks.parity --steps 20 --ranks 1,2 --json benchmarks/results/parity.json

Every engine trains the same small model on the same trajectories, in float32 and in bfloat16, and is compared with one
plain torch process in float32. In float32 nothing but the order of additions may differ; in bfloat16 everything is
rounded to 8 bits, so look there at how alike the backends are.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.process import run_logged
from benchmarks.record import add_results_option, provenance, write_results

LAUNCH = ["-m", "torch.distributed.run", "--standalone"]


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="of two updates each")
    parser.add_argument("--ranks", default="1,2,4", help="world sizes to run; 1 must be among them")
    add_results_option(parser)
    args = parser.parse_args(argv)
    sizes = [int(size) for size in args.ranks.split(",")]
    if 1 not in sizes:
        parser.error("--ranks: everything is compared with one rank")
    measured_on = provenance()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        for size in sorted(sizes):
            rank = ["-m", "benchmarks.parity_rank", str(folder), str(args.steps)]
            command = [sys.executable, *LAUNCH, f"--nproc_per_node={size}", *rank]
            run_logged(command, folder / f"log_{size}", processes=size)
        rows = compared([torch.load(file) for file in sorted(folder.glob("*.pt"))])
    print(table(rows))
    write_results(args.json, {"provenance": measured_on, "rows": rows})


def make_model(path: Path) -> None:
    from rlhf_mp.models.tiny import TinyShape, character_tokenizer, make_checkpoint

    make_checkpoint(path, character_tokenizer("0123456789+="), TinyShape(hidden=64, head_dim=16), std=0.1)


def compared(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per engine and type, in the order they ran: largest differences from torch in float32."""
    runs = sorted(runs, key=lambda run: (run["dtype"] != "float32", run["ranks"], run["order"]))
    truth = next(run for run in runs if run["layout"] == "torch")
    return [
        {
            **{key: run[key] for key in ("layout", "ranks", "dtype", "losses", "grad_norms")},
            "max_loss_diff": largest(run["losses"], truth["losses"]),
            "max_grad_norm_diff": largest(run["grad_norms"], truth["grad_norms"]),
            "max_weight_diff": max(
                (run["weights"][name].float() - weight).abs().max().item() for name, weight in truth["weights"].items()
            ),
        }
        for run in runs
    ]


def largest(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def table(rows: list[dict[str, Any]]) -> str:
    """For reading: the differences, then every update's loss and gradient norm."""
    columns = ("max_loss_diff", "max_grad_norm_diff", "max_weight_diff")
    width = max(len(row["layout"]) for row in rows)
    lines = [f"{'type':9} {'layout':{width}} {'ranks':>5} " + " ".join(f"{name:>18}" for name in columns)]
    for row in rows:
        numbers = " ".join(f"{row[name]:18.1e}" for name in columns)
        lines.append(f"{row['dtype']:9} {row['layout']:{width}} {row['ranks']:5} {numbers}")
    lines += ["", "loss / gradient norm of each update"]
    for row in rows:
        pairs = zip(row["losses"], row["grad_norms"], strict=True)
        updates = "  ".join(f"{loss:+.4f}/{norm:.4f}" for loss, norm in pairs)
        lines.append(f"{row['dtype']:9} {row['layout']:{width}} {updates}")
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
