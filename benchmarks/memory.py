"""Planned beside measured memory: real runs of the quickstart in every layout, and a ladder of models in one process.

  python -m benchmarks.memory --json benchmarks/results/memory.json

The ladder climbs from 10 M parameters to whatever fits this machine; a line fitted through it says what the plan
leaves out: a constant (the program itself) and a share of what it names.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import linear_regression
from typing import Any

import psutil
import torch

from benchmarks.process import run_logged, train
from benchmarks.record import add_results_option, provenance, write_results
from benchmarks.report import Table

CONFIGS = Path(__file__).parents[1] / "configs"
OFFLOADS = "actor_rollout_ref.actor.fsdp_config"
MEGATRON = "actor_rollout_ref.actor.megatron"
RUNS: dict[str, tuple[str, int, list[str]]] = {  # layout: config, ranks, overrides
    "torch": ("quickstart", 1, ["actor_rollout_ref.actor.strategy=torch"]),
    "ZeRO-3, 1 rank": ("quickstart", 1, []),
    "ZeRO-3, 2 ranks": ("quickstart", 2, []),
    "ZeRO-3, 2 ranks, offload": ("quickstart", 2, ["offload"]),
    "ZeRO-3, 1 rank, offload": ("quickstart", 1, ["offload"]),
    "Megatron TP2": ("quickstart_megatron", 2, []),
    "Megatron PP2": (
        "quickstart_megatron",
        2,
        [f"{MEGATRON}.tensor_model_parallel_size=1", f"{MEGATRON}.pipeline_model_parallel_size=2"],
    ),
}
"""Without "offload" DeepSpeed keeps parameters and optimizer where it would on a GPU."""
LADDER = ((10, 256, 6), (30, 384, 12), (100, 640, 16), (300, 1024, 20), (1000, 2048, 18), (3000, 2560, 36))
"""Million parameters, about; hidden width; layers."""
USED_SHARE = 0.6  # of the memory that is free now


def quickstart_rows(scratch: Path, material: Path | None, only: list[str] | None) -> list[list[Any]]:
    if material is None:
        material = scratch / "material"
        run_logged([sys.executable, "-m", "rlhf_mp.quickstart", "--out", str(material)], scratch / "log", 1)
    rows = []
    for layout in RUNS if only is None else only:
        rows += [[layout, *_cells(row)] for row in run_quickstart(layout, scratch, material)]
        print("\n".join(f"{layout}: {row[1]} {row[-1]:+.1%}" for row in rows if row[0] == layout), flush=True)
    return rows


def _cells(row: dict[str, Any]) -> list[Any]:
    sizes = [row[key] * 1024 for key in ("planned_gib", "planned_for_largest_batch_gib", "measured_gib")]
    return [row["what"], *sizes, row["difference"]]


def run_quickstart(layout: str, scratch: Path, material: Path) -> list[dict[str, Any]]:
    """Three steps of the real trainer; what its summary says of rank 0's memory."""
    config, num_ranks, words = RUNS[layout]
    run_dir = scratch / layout.replace(" ", "_").replace(",", "")
    overrides = [word for word in words if word != "offload"]
    if config == "quickstart" and "offload" not in words:
        overrides += [f"{OFFLOADS}.param_offload=false", f"{OFFLOADS}.optimizer_offload=false"]
    overrides += [
        f"actor_rollout_ref.model.path={material / 'model'}",
        f"data.train_files={material / 'train.jsonl'}",
        f"data.val_files={material / 'val.jsonl'}",
        "actor_rollout_ref.rollout.num_engines=1",
        "trainer.total_training_steps=3",
        "trainer.val_before_train=false",
        "data.val_max_samples=8",
        "trainer.save_hf=never",
        f"trainer.n_gpus_per_node={num_ranks}",
        f"trainer.default_local_dir={run_dir}",
    ]
    train(CONFIGS / f"{config}.yaml", overrides, num_ranks, scratch / "log")
    return json.loads((run_dir / "summary.json").read_text())["memory"]


def ladder_rows(scratch: Path, tokens: int, largest: int | None) -> list[dict[str, Any]]:
    """Each rung in a process of its own: the memory of a process never shrinks back."""
    records = []
    for millions, hidden, layers in LADDER:
        if largest is not None and millions > largest:
            break
        out = scratch / "rung.json"
        free = psutil.virtual_memory().available * USED_SHARE
        case = json.dumps({"hidden": hidden, "layers": layers, "tokens": tokens, "limit": free})
        run_logged([sys.executable, "-m", "benchmarks.memory_rung", case, str(out)], scratch / "log", 1)
        record = json.loads(out.read_text())
        records.append(record)
        print(json.dumps(record), flush=True)
        if "measured_bytes" not in record:
            break
    return records


def fitted(records: list[dict[str, Any]], measured: str) -> dict[str, float] | None:
    """The line measured = constant + factor x planned, and the largest miss of it and of the plan itself."""
    pairs = [(r["planned_bytes"], r[measured]) for r in records if measured in r]
    if len(pairs) < 3:
        return None
    factor, constant = linear_regression(*zip(*pairs, strict=True))
    off = [abs((constant + factor * plan) / real - 1) for plan, real in pairs]
    return {
        "factor": factor,
        "constant_bytes": constant,
        "largest_residual": max(off),
        "largest_miss_of_the_plan": max(abs(plan / real - 1) for plan, real in pairs),
    }


def tables(results: dict[str, Any]) -> list[Table]:
    runs = Table(
        "Memory of quickstart runs, rank 0",
        ["layout", "what", "planned MiB", "planned for largest batch MiB", "measured MiB", "difference"],
        results["quickstart"],
        "Real runs of three steps. Planned: sequences of full length. Difference: of the plan for the largest "
        "micro-batch that came, from what was measured.",
    )
    rungs = [
        [
            f"{r['num_params'] / 1e6:.0f} M",
            r["device"],
            r["planned_bytes"] / 2**20,
            *(r[key] / 2**20 if key in r else None for key in ("measured_bytes", "process_bytes")),
            r["planned_bytes"] / r["measured_bytes"] - 1 if "measured_bytes" in r else None,
            r.get("not_run"),
        ]
        for r in results["ladder"]
    ]
    columns = ["model", "device", "planned MiB", "tensors MiB", "process MiB", "difference", "not run"]
    note = "One training step in one process, plain torch. Fits: " + json.dumps(results["fits"])
    return [runs, Table("Memory of a ladder of models", columns, rungs, note, label="model", chart="difference")]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        quickstart = quickstart_rows(scratch, args.material, args.layouts) if args.layouts != [] else []
        ladder = ladder_rows(scratch, args.tokens, args.largest)
    fits = {key: fitted(ladder, key) for key in ("measured_bytes", "process_bytes")}
    return {"quickstart": quickstart, "ladder": ladder, "fits": fits, "on_gpu": torch.cuda.is_available()}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="*", choices=tuple(RUNS), help="of the quickstart; unset: all")
    parser.add_argument("--material", type=Path, help="the quickstart's folder; unset: made")
    parser.add_argument("--tokens", type=int, default=1024, help="of the ladder's micro-batch")
    parser.add_argument("--largest", type=int, help="million parameters of the ladder's last rung; 0: no ladder")
    add_results_option(parser)
    args = parser.parse_args(argv)
    measured_on = provenance()
    results = measure(args)
    print("\n\n".join(table.terminal() for table in tables(results)))
    write_results(args.json, {"provenance": measured_on, **results})


if __name__ == "__main__":
    main(sys.argv[1:])
