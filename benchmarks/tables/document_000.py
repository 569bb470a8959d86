"""Document 000: three models, from no optimization to all of them, and the cards to do it on."""

import math
import re
from dataclasses import dataclass

from benchmarks.tables.cells import Answer, Cell, Range, exactly
from rlhf_mp.planner.activations import training_activations
from rlhf_mp.planner.amount import GB
from rlhf_mp.planner.inference import cache_bytes_per_token
from rlhf_mp.planner.job import BF16, EAGER, Batch, ZeroLayout
from rlhf_mp.planner.known_models import find_model
from rlhf_mp.planner.states import gathered_weights, reduce_bucket, trained_states, whole_gradient
from rlhf_mp.planner.term import Role, total

SEQUENCES, LENGTH, SYSTEM_GB = 32, 2048, 2.0
TOKENS = SEQUENCES * LENGTH


@dataclass(frozen=True)
class Printed:
    """What the document assumes of a model, and two of its results that later lines use."""

    params: float
    layers: int
    hidden: int
    gpus: int
    offloaded_gb: float
    reduced_cache_gb: float
    model: str
    max_tokens: int  # ppo_max_token_len_per_gpu of its configuration


MODELS = {
    "3B": Printed(3e9, 32, 2560, 8, 0.8, 10.1, "qwen2.5-3b", 12000),
    "8B": Printed(8e9, 32, 4096, 8, 1.3, 16.1, "llama-3.1-8b", 16000),
    "32B": Printed(32e9, 64, 5120, 16, 3.2, 50.6, "qwen2.5-32b", 24000),
}
STAGES = {  # column of the summary -> column of the detailed analysis
    "Base Memory": "total without optimizations",
    "FSDP Only": "FSDP total per GPU",
    "+ Gradient Checkpointing": "+ checkpointing total",
    "+ Activation Offloading": "+ offloading total",
    "+ Dynamic Batching": "+ dynamic batching total",
}


def recomputed(cell: Cell) -> Range | None:
    """By the document's own formulas: 2 + 2 + 4 bytes a parameter, one tensor a layer, keys and values of all heads."""
    if cell.table == "000-config":
        return None
    own = MODELS[cell.row]
    if cell.table == "000-hardware":
        (gpus,) = re.findall(r"(\d+)×", cell.printed)
        return exactly(8 * own.params / GB / int(gpus) + own.offloaded_gb + own.reduced_cache_gb + SYSTEM_GB)
    values = _formulas(own)
    column = STAGES.get(cell.column, cell.column)
    return exactly(values[column]) if column in values else None


def _formulas(own: Printed) -> dict[str, float]:
    states = 8 * own.params / GB
    activations = TOKENS * own.hidden * own.layers * 2 / GB
    cache = TOKENS * own.layers * own.hidden * 2 * 2 / GB
    rest = cache + SYSTEM_GB
    sharded = states / own.gpus
    return {
        "hidden size": math.sqrt(own.params / (12 * own.layers)),
        "FFN dimension": 2.75 * own.hidden,
        "model parameters": 2 * own.params / GB,
        "gradients": 2 * own.params / GB,
        "AdamW states": 4 * own.params / GB,
        "activations": activations,
        "KV cache": cache,
        "total without optimizations": states + activations + rest,
        "FSDP total per GPU": sharded + activations + rest,
        "checkpointed activations": activations / 4,
        "+ checkpointing total": sharded + activations / 4 + rest,
        "offloaded activations": activations / 4 * 0.3,
        "+ offloading total": sharded + activations / 4 * 0.3 + rest,
        "reduced KV cache": cache * 0.6,
        "+ dynamic batching total": sharded + activations / 4 * 0.3 + cache * 0.6 + SYSTEM_GB,
    }


def planned(cell: Cell) -> Answer | None:
    """The document's scenario, 65,536 tokens in one micro-batch a GPU, on the real model of that size."""
    own = MODELS[cell.row]
    shape = find_model(own.model)
    facts = {
        "parameters": (shape.num_params, shape.name),
        "hidden size": (shape.hidden, shape.name),
        "FFN dimension": (shape.ffn, shape.name),
        "attention heads": (shape.heads, f"{shape.name}, {shape.kv_heads} of them with keys and values"),
        "model parameters": (2 * shape.num_params / GB, "2 bytes a parameter"),
        "gradients": (2 * shape.num_params / GB, "2 bytes a parameter; 4 where they are summed in float32"),
        "AdamW states": (12 * shape.num_params / GB, "float32 master weights and moments"),
    }
    if cell.column in facts:
        value, basis = facts[cell.column]
        return Answer(exactly(value), basis)
    if cell.table == "000-hardware":
        gpus = int(re.findall(r"(\d+)×", cell.printed)[0])
        batch = Batch(own.max_tokens, LENGTH, logit_tokens=1024, activation_offload=True)
        need = _states(own, gpus) + _activations(own, batch) + SYSTEM_GB
        return Answer(exactly(need), f"training phase on {gpus} GPUs, offloaded checkpoints, chunked logits")
    if cell.table == "000-config":
        return None
    return _stage(own, STAGES.get(cell.column, cell.column))


def _stage(own: Printed, column: str) -> Answer | None:
    whole = Batch(TOKENS, LENGTH, recompute="none")
    full = Batch(TOKENS, LENGTH)
    away = Batch(TOKENS, LENGTH, activation_offload=True)
    packed = Batch(own.max_tokens, LENGTH, activation_offload=True)
    cache = TOKENS * cache_bytes_per_token(find_model(own.model), 1, 2).value / GB
    alone, sharded = _states(own, 1), _states(own, own.gpus)
    values = {
        "activations": (_stored(own, whole), "all tensors that the backward pass needs; logits not counted"),
        "KV cache": (cache, "keys and values of the KV heads only"),
        "total without optimizations": (alone + _activations(own, whole) + cache + SYSTEM_GB, "with logits"),
        "FSDP total per GPU": (sharded + _activations(own, whole) + cache + SYSTEM_GB, f"ZeRO-3 over {own.gpus}"),
        "checkpointed activations": (_stored(own, full), "one tensor a layer"),
        "+ checkpointing total": (sharded + _activations(own, full) + cache + SYSTEM_GB, "full recomputation"),
        "offloaded activations": (_stored(own, away), "two layers stay on the GPU"),
        "+ offloading total": (sharded + _activations(own, away) + cache + SYSTEM_GB, "logits are not offloaded"),
        "reduced KV cache": (cache, "the size of training micro-batches does not change it"),
        "+ dynamic batching total": (
            sharded + _activations(own, packed) + cache + SYSTEM_GB,
            f"micro-batches of {own.max_tokens:,} tokens",
        ),
    }
    value, basis = values[column]
    return Answer(exactly(value), basis)


def _states(own: Printed, gpus: int) -> float:
    shape, layout = find_model(own.model), ZeroLayout(gpus, stage=3 if gpus > 1 else 0)
    terms = trained_states(Role.actor, shape.num_params, layout, BF16) + reduce_bucket(Role.actor, layout, BF16)
    terms += gathered_weights(Role.actor, shape, layout, BF16) + whole_gradient(Role.actor, shape, layout, BF16)
    return total(terms, on_host=False) / GB


def _activations(own: Printed, batch: Batch) -> float:
    return training_activations(find_model(own.model), ZeroLayout(own.gpus), batch, EAGER, 2).peak / GB


def _stored(own: Printed, batch: Batch) -> float:
    return training_activations(find_model(own.model), ZeroLayout(own.gpus), batch, EAGER, 2).stored.value / GB
