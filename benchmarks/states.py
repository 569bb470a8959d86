"""What DeepSpeed and Megatron really keep, against the plan: bytes by component, in every layout, on CPU ranks.

python -m benchmarks.states --model runs/quickstart/model --num-ranks 1 2 --json benchmarks/results/zero_states.json
python -m benchmarks.states --backend megatron --model ... --json benchmarks/results/megatron_states.json
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.process import run_logged
from benchmarks.record import add_results_option, provenance, write_results
from rlhf_mp.planner.hf_config import read_shape
from rlhf_mp.planner.job import BF16, BF16_FP32_GRADS, FP32, MegatronLayout, ZeroLayout
from rlhf_mp.planner.model_shape import ModelShape
from rlhf_mp.planner.states import megatron_states, trained_states
from rlhf_mp.planner.term import Component, Role

COMPONENTS = (Component.weights, Component.gradients, Component.master, Component.optimizer)
NOTE = (
    "Gradients are counted between the backward pass and the step. Stage 1 has reduced its whole gradients to its "
    "share by then, the plan is for the backward pass: that cell is not compared."
)


def planned(shape: ModelShape, num_ranks: int, case: dict[str, Any]) -> dict[str, float]:
    """Bytes of the fullest rank by component, on GPU and host together: on a CPU both are one."""
    single = case["dtype"] == "float32"
    if "megatron" in case:
        own = case["megatron"]
        layout = MegatronLayout(
            num_ranks,
            own.get("tensor_model_parallel_size", 1),
            own.get("pipeline_model_parallel_size", 1),
            distributed_optimizer=own.get("use_distributed_optimizer", True),
            optimizer_offload=own.get("optimizer_offload", False),
        )
        terms = megatron_states(Role.actor, shape, layout, FP32 if single else BF16_FP32_GRADS)
    else:
        layout = ZeroLayout(
            num_ranks, case["stage"], param_offload=case["param_offload"], optimizer_offload=case["optimizer_offload"]
        )
        terms = trained_states(Role.actor, shape.num_params, layout, FP32 if single else BF16)
    return {part.value: sum(t.bytes for t in terms if t.component is part) for part in COMPONENTS}


def compare(model: Path, num_ranks: int, log: Path, backend: str = "deepspeed") -> list[dict[str, Any]]:
    """Every case of ``benchmarks.states_rank`` with the plan beside it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
        run_logged([*launcher, "-m", "benchmarks.states_rank", backend, str(model), str(out)], log, num_ranks)
        measured = json.loads(out.read_text())
    shape = read_shape(model)
    return [record(case, num_ranks, planned(shape, num_ranks, case)) for case in measured]


def record(case: dict[str, Any], num_ranks: int, plan: dict[str, float]) -> dict[str, Any]:
    """One case; a difference is planned / measured - 1, None where it is not comparable or there is nothing."""
    kept = case.pop("bytes")
    real = {part: kept.get(part, 0) for part in plan}
    differences = {
        part: plan[part] / real[part] - 1 if real[part] and (case.get("stage"), part) != (1, "gradients") else None
        for part in plan
    }
    return {"num_ranks": num_ranks, **case, "measured_bytes": real, "planned_bytes": plan, "difference": differences}


def layout_name(cell: dict[str, Any]) -> str:
    if "megatron" in cell:
        return "Megatron " + (" ".join(f"{key}={value}" for key, value in cell["megatron"].items()) or "as it is")
    offload = "+param" * cell["param_offload"] + "+optimizer" * cell["optimizer_offload"]
    return f"stage {cell['stage']} {offload or 'no offload'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face checkpoint folder")
    parser.add_argument("--backend", choices=("deepspeed", "megatron"), default="deepspeed")
    parser.add_argument("--num-ranks", type=int, nargs="+", default=[1, 2])
    add_results_option(parser)
    args = parser.parse_args()
    measured_on, cells = provenance(), []
    for num_ranks in args.num_ranks:
        with tempfile.TemporaryDirectory() as folder:
            cells += compare(args.model, num_ranks, Path(folder) / "log", args.backend)
    for cell in cells:
        parts = " ".join(f"{k}={v:+.1%}" for k, v in cell["difference"].items() if v is not None)
        print(f"{cell['num_ranks']} rank(s) {cell['dtype']} {layout_name(cell)}: {parts}")
    write_results(args.json, {"provenance": measured_on, "note": NOTE, "cells": cells})


if __name__ == "__main__":
    main()
