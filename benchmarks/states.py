"""What DeepSpeed really keeps, against the plan: bytes by component, for every ZeRO stage and offload, on CPU ranks.

python -m benchmarks.states --model runs/quickstart/model --num-ranks 1 2 --out benchmarks/results/zero_states.json
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import provenance
from benchmarks.process import run_logged
from rlhf_mp.planner.hf_config import read_shape
from rlhf_mp.planner.job import BF16, FP32, ZeroLayout
from rlhf_mp.planner.states import trained_states
from rlhf_mp.planner.term import Component, Role

COMPONENTS = (Component.weights, Component.gradients, Component.master, Component.optimizer)
NOTE = (
    "Gradients are counted between the backward pass and the step. Stage 1 has reduced its whole gradients to its "
    "share by then, the plan is for the backward pass: that cell is not compared."
)


def planned(params: int, num_ranks: int, case: dict[str, Any]) -> dict[str, float]:
    """Bytes of a rank by component, on GPU and host together: on a CPU both are one."""
    layout = ZeroLayout(
        num_ranks, case["stage"], param_offload=case["param_offload"], optimizer_offload=case["optimizer_offload"]
    )
    terms = trained_states(Role.actor, params, layout, FP32 if case["dtype"] == "float32" else BF16)
    return {part.value: sum(t.bytes for t in terms if t.component is part) for part in COMPONENTS}


def compare(model: Path, num_ranks: int, log: Path) -> list[dict[str, Any]]:
    """Every case of ``benchmarks.states_rank`` with the plan beside it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
        run_logged([*launcher, "-m", "benchmarks.states_rank", str(model), str(out)], log, num_ranks)
        measured = json.loads(out.read_text())
    params = read_shape(model).num_params
    return [record(case, num_ranks, planned(params, num_ranks, case)) for case in measured]


def record(case: dict[str, Any], num_ranks: int, plan: dict[str, float]) -> dict[str, Any]:
    """One case; a difference is planned / measured - 1, None where it is not comparable or there is nothing."""
    real = case.pop("bytes")
    differences = {
        part: plan[part] / real[part] - 1 if real[part] and not (case["stage"] == 1 and part == "gradients") else None
        for part in plan
    }
    return {"num_ranks": num_ranks, **case, "measured_bytes": real, "planned_bytes": plan, "difference": differences}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face checkpoint folder")
    parser.add_argument("--num-ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    args = parser.parse_args()
    cells = []
    for num_ranks in args.num_ranks:
        with tempfile.TemporaryDirectory() as folder:
            cells += compare(args.model, num_ranks, Path(folder) / "log")
    for cell in cells:
        parts = " ".join(f"{k}={v:+.1%}" for k, v in cell["difference"].items() if v is not None)
        offload = "+param" * cell["param_offload"] + "+optimizer" * cell["optimizer_offload"]
        print(f"{cell['num_ranks']} rank(s) {cell['dtype']} stage {cell['stage']} {offload or 'no offload'}: {parts}")
    args.out.write_text(json.dumps({"provenance": provenance(), "note": NOTE, "cells": cells}, indent=1) + "\n")


if __name__ == "__main__":
    main()
