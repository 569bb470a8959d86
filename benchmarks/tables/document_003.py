"""Documents 001 and 003: memory by component, memory a GPU, throughput, and claims in percent."""

import json
from pathlib import Path

from benchmarks.tables.cells import Answer, Cell, Range, exactly
from rlhf_mp.planner.activations import training_activations
from rlhf_mp.planner.amount import GB, GIB
from rlhf_mp.planner.hardware import find_gpu
from rlhf_mp.planner.inference import cache_bytes_per_token
from rlhf_mp.planner.job import EAGER, Batch, Engine, Job, Workload, ZeroLayout
from rlhf_mp.planner.known_models import find_model
from rlhf_mp.planner.plan import make_plan
from rlhf_mp.planner.throughput import step_time

# parameters as counted there, printed activations and KV cache in GB, GPUs, the real model
MODELS = {
    "3B": (3e9, 2.0, 4.0, 4, "qwen2.5-3b"),
    "8B": (8e9, 4.0, 8.0, 8, "llama-3.1-8b"),
    "32B": (32e9, 12.0, 32.0, 16, "qwen2.5-32b"),
    "70B": (70e9, 24.0, 64.0, 32, "llama-3.1-70b"),
}
RUNS = Path(__file__).parents[1] / "results" / "throughput.json"
MICRO_BATCH, CACHED_TOKENS = 16384, 32 * 2048


def recomputed(cell: Cell) -> Range | None:
    """2 bytes a parameter and gradient, 4 of optimizer; activations and KV cache have no stated length or batch."""
    if cell.table == "001-claims":
        return exactly(100 / 3)
    if cell.table == "003-claims":
        return exactly(1.0) if "mixed precision" in cell.row else None  # 16 bytes a parameter either way
    params, activations, cache, gpus, _ = MODELS[cell.row]
    values = {"Parameters": 2 * params / GB, "Gradients": 2 * params / GB, "Optimizer": 4 * params / GB}
    values["Total"] = 8 * params / GB + activations + cache
    values["Memory per GPU"] = values["Total"] / gpus
    return exactly(values[cell.column]) if cell.column in values else None


def planned(cell: Cell) -> Answer | None:
    if cell.table in ("001-claims", "003-claims"):
        return _claim(cell)
    *_, gpus, name = MODELS[cell.row]
    shape = find_model(name)
    batch = Batch(MICRO_BATCH, 2048)
    activations = training_activations(shape, ZeroLayout(gpus), batch, EAGER, 2)
    cache = CACHED_TOKENS * cache_bytes_per_token(shape, 1, 2).value
    stored, states = activations.stored.value, 16 * shape.num_params
    values = {
        "Parameters": (2 * shape.num_params, "2 bytes a parameter"),
        "Gradients": (2 * shape.num_params, "2 bytes a parameter; 4 where they are summed in float32"),
        "Optimizer": (12 * shape.num_params, "float32 master weights and moments"),
        "Activations": (stored, f"a GPU, {MICRO_BATCH:,} tokens, full recompute, no logits"),
        "KV Cache": (cache, f"{CACHED_TOKENS:,} tokens (assumed), KV heads only"),
        "Total": (states + activations.peak + cache, "16 bytes a parameter, one GPU's activations and logits, cache"),
    }
    if cell.column in values:
        value, basis = values[cell.column]
        return Answer(exactly(value / GB), basis)
    return _run(cell, name, gpus)


def _run(cell: Cell, name: str, gpus: int) -> Answer | None:
    """The headline rows as GRPO on H100s: engines asleep in training, chunked logits; lengths are assumed."""
    shape, batch = find_model(name), Batch(MICRO_BATCH, 2048, logit_tokens=1024)
    tp = max(1, gpus // 4) if gpus < 32 else 8
    engine = Engine(tp=tp, num_engines=gpus // tp, sleeps=True)
    plan = make_plan(Job(shape, ZeroLayout(gpus), batch, find_gpu("h100"), engine=engine, scores_old_policy=False))
    if cell.column == "Memory per GPU":
        return Answer(exactly(plan.moments[-2].gpu_bytes / GB), "training phase: ZeRO-3 GRPO, chunked logits")
    if cell.column == "Throughput (tokens/s)":
        speed = step_time(plan, Workload(512, 8, 512, 1024)).tokens_per_second
        return Answer(exactly(speed), f"roofline of GRPO on {gpus} H100 (card and lengths assumed)")
    return None


def measured(cell: Cell) -> Range | None:
    """What a run of the headline config of this row did, if one was ever measured (benchmarks/throughput.py)."""
    key, scale = {"Memory per GPU": ("peak_gib", GIB / GB), "Throughput (tokens/s)": ("tokens_per_s", 1.0)}.get(
        cell.column, ("", 0.0)
    )
    if cell.table != "003-bench" or not key or not RUNS.is_file():
        return None
    runs = {record["size"]: record["measured"] for record in json.loads(RUNS.read_text())["cells"]}
    value = runs[cell.row].get(key)
    return exactly(value * scale) if value is not None else None


def _claim(cell: Cell) -> Answer | None:
    shape = find_model("llama-3.1-8b")
    whole, full, away = (
        training_activations(shape, ZeroLayout(8), batch, EAGER, 2).stored.value
        for batch in (
            Batch(MICRO_BATCH, 2048, recompute="none"),
            Batch(MICRO_BATCH, 2048),
            Batch(MICRO_BATCH, 2048, recompute="none", activation_offload=True),
        )
    )
    values = {
        "activation offloading": 100 * (1 - away / whole),
        "gradient checkpointing reduces": 100 * (1 - full / whole),
        "gradient checkpointing extra": 100 / 3,
        "mixed precision": 1.0,
    }
    for start, value in values.items():
        if cell.row.startswith(start):
            return Answer(
                exactly(value), f"{shape.name}, stored activations without logits" if value > 40 else shape.name
            )
    return None
