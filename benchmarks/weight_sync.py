"""How fast new weights reach running SGLang servers, by transport, size, ranks, tensor parallelism and engines.

  python -m benchmarks.weight_sync --json benchmarks/results/weight_sync.json
  python -m benchmarks.weight_sync --mb 50 --ranks 1 --tensor-parallel 1 2 --engines 1

Every swap is the trainer's own, verified: the engines' checksums are in the seconds. Beside it, from the same run, a
plain copy of as many bytes, and the naive way, one call for every parameter.
"""

import argparse
import itertools
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from benchmarks.process import run_logged
from benchmarks.record import add_results_option, provenance, write_results
from benchmarks.report import Table
from rlhf_mp.models.tiny import TinyShape, character_tokenizer, make_checkpoint

COPY_GOAL, PER_PARAMETER_GOAL = 0.5, 5.0
TRANSPORTS = ("tensor", "distributed", "disk")
ENGINE_GIB, ZERO_BYTES = 2.2, 5  # of a server beside its weights; of ZeRO-3 training in weights: 20 bytes for 4


def shape_of(mb: int) -> TinyShape:
    """A float32 model of about so many MB: wider ones have larger tensors, as real ones do."""
    hidden = 512 if mb <= 100 else 1024 if mb <= 600 else 2048
    heads = hidden // 64
    per_layer = 4 * (hidden * hidden * 2 + hidden * hidden // 2 * 2 + 3 * hidden * 3 * hidden)
    return TinyShape(hidden, max(1, math.ceil(mb * 1e6 / per_layer)), heads, heads // 2, 64)


def needed_gib(mb: int, num_ranks: int, tensor_parallel: int, engines: int) -> float:
    weights = mb * 1e6 / 2**30
    trainer = weights * (ZERO_BYTES if num_ranks > 1 else 1) + num_ranks
    return trainer + engines * (2 * weights + ENGINE_GIB * tensor_parallel) + 2 * weights


def run_case(case: dict[str, Any], num_ranks: int, scratch: Path) -> dict[str, Any]:
    out = scratch / "out.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
    command = [*launcher, "-m", "benchmarks.weight_sync_rank", json.dumps(case), str(out)]
    run_logged(command, scratch / "log", num_ranks + case["engines"] * case["tensor_parallel"])
    return json.loads(out.read_text())


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A record for every transport of every case, and one for each case that does not fit the machine."""
    records = []
    for mb in args.mb:
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "model"
            make_checkpoint(model, character_tokenizer("0123456789+= "), shape_of(mb))
            for ranks, tp, engines in itertools.product(args.ranks, args.tensor_parallel, args.engines):
                where = {"mb": mb, "ranks": ranks, "tensor_parallel": tp, "engines": engines}
                needed, free = needed_gib(mb, ranks, tp, engines), psutil.virtual_memory().available / 2**30
                if needed > free:
                    records.append(where | {"not_run": f"needs about {needed:.1f} GiB, {free:.1f} are free"})
                    continue
                case = {
                    "model": str(model),
                    "tensor_parallel": tp,
                    "engines": engines,
                    "transports": args.transports,
                    "rounds": args.rounds,
                    "per_parameter": mb <= args.per_parameter_mb,
                }
                records += flattened(where, run_case(case, ranks, Path(folder)))
                print(table(records[-len(args.transports) :]).terminal(), flush=True)
    return records


def flattened(where: dict[str, Any], result: dict[str, Any]) -> list[dict[str, Any]]:
    naive = result.get("per_parameter_s")
    return [
        where
        | {"transport": name, **values, "copy_gb_per_s": result["copy_gb_per_s"]}
        # an engine's own copy of the bytes is one copy: several engines each need theirs
        | {"of_copy": values["gb_per_s"] * where["engines"] / result["copy_gb_per_s"]}
        | {"per_parameter_s": naive, "times_faster": naive / values["seconds"] if naive else None}
        for name, values in result["transports"].items()
    ]


COLUMNS = {
    "mb": "MB",
    "ranks": "ranks",
    "tensor_parallel": "TP",
    "engines": "engines",
    "transport": "transport",
    "seconds": "s",
    "gather_s": "gather s",
    "wait_s": "wait s",
    "verify_s": "verify s",
    "other_s": "other s",
    "engine_verify_s": "engine verify s",
    "gb_per_s": "GB/s",
    "of_copy": f"of copy (goal {COPY_GOAL:g})",
    "per_parameter_s": "per parameter s",
    "times_faster": f"times faster (goal {PER_PARAMETER_GOAL:g})",
    "not_run": "not run",
}


def table(records: list[dict[str, Any]]) -> Table:
    rows = [[record.get(key) for key in COLUMNS] for record in records]
    note = (
        "Medians of whole verified swaps. 'Wait': for engines, what gathering does not hide; 'engine verify' is hidden "
        "too. 'Of copy': bytes into all engines a second, against a plain copy in the same process. 'Per parameter': "
        "one HTTP call for each tensor, unverified, one engine after the other."
    )
    return Table("Weight swap", list(COLUMNS.values()), rows, note, label="transport", chart="GB/s")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, nargs="+", default=[50, 500, 2000], help="of float32 weights")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tensor-parallel", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--rounds", type=int, default=3, help="measured swaps after one that warms up")
    parser.add_argument("--per-parameter-mb", type=int, default=500, help="largest size tried the naive way")
    add_results_option(parser)
    args = parser.parse_args(argv)
    measured_on = provenance()
    records = measure(args)
    print(table(records).terminal())
    write_results(args.json, {"provenance": measured_on, "cells": records})


if __name__ == "__main__":
    main(sys.argv[1:])
