"""Document 002: memory by model and method, the cards for it, and its two decision guides."""

from dataclasses import replace

from benchmarks.tables.cells import Answer, Cell, Range, exactly, printed_cells
from rlhf_mp.planner.activations import training_activations
from rlhf_mp.planner.amount import GB, GIB
from rlhf_mp.planner.capacity import METHODS, single_gpu_job
from rlhf_mp.planner.hardware import Gpu, find_gpu
from rlhf_mp.planner.inference import cache_bytes_per_token
from rlhf_mp.planner.job import EAGER, Adapter, Batch, Engine, TorchLayout
from rlhf_mp.planner.known_models import find_model
from rlhf_mp.planner.plan import make_plan
from rlhf_mp.planner.states import base_weights, lora_params
from rlhf_mp.planner.throughput import training_flops

LENGTH = 2048
# parameters as the document counts them, hidden x layers, and the real model of that size
MODELS = {
    "125M": (0.125e9, 768 * 12, "gpt-2"),
    "355M": (0.355e9, 1024 * 24, "gpt-2-medium"),
    "774M": (0.774e9, 1280 * 36, "gpt-2-large"),
    "1.3B": (1.3e9, 2048 * 24, "opt-1.3b"),
    "3B": (3e9, 2560 * 32, "qwen2.5-3b"),
    "7B": (7e9, 4096 * 32, "llama-2-7b"),
    "13B": (13e9, 5120 * 40, "llama-2-13b"),
    "70B": (70e9, 8192 * 80, "llama-2-70b"),
}
BYTES = {"FP16": 2.0, "8-bit": 1.0, "4-bit": 0.5}
QUANTIZATION = {"FP16": None, "8-bit": "int8", "4-bit": "nf4"}
METHOD_OF = {"Full Fine-tune": "full", "LoRA": "LoRA", "QLoRA (4-bit)": "QLoRA", "QLoRA": "QLoRA"}
GUIDE_METHODS = {"Minimum (QLoRA)": "QLoRA", "Recommended (LoRA)": "LoRA", "Ideal (Full FT)": "full"}
GUIDE_MODELS = {"GPT-2 (124M)": ("125M", "gpt-2"), "Phi-2 (2.7B)": ("3B", "phi-2")}
GUIDE_MODELS |= {f"Llama-2-{size}": (size, f"llama-2-{size.lower()}") for size in ("7B", "13B", "70B")}
CONFIG_METHODS = {"Full FT": "full", "LoRA": "LoRA", "QLoRA": "QLoRA"}
LARGEST = {"< 1B": "774M", "1-3B": "3B"}  # of the rows of its hardware table


def training_gb(size: str) -> float:
    """Its formula as its worked example uses it: 2 + 2 + 8 bytes a parameter and one tensor a layer."""
    params, width, _ = MODELS[size]
    return (12 * params + LENGTH * width * 2) / GB


def inference_gb(size: str, bytes_each: float, batch: int) -> float:
    params, width, _ = MODELS[size]
    return (params * bytes_each + 2 * width * batch * LENGTH * 2) / GB


def printed_training_gb(size: str, method: str) -> float:
    """What its first table prints; its guides have to agree with that."""
    cells = [c for c in printed_cells() if c.table == "002-train" and c.row == size and METHOD_OF[c.column] == method]
    return cells[0].value.low


def guide_key(cell: Cell) -> tuple[str, str]:
    """The size and the method that a guide's cell is about."""
    if cell.table == "002-vram-guide":
        return cell.printed.split("-> ")[1].split()[0], METHOD_OF[cell.column]
    if cell.table == "002-model-guide":
        return GUIDE_MODELS[cell.row][0], GUIDE_METHODS[cell.column]
    return LARGEST.get(cell.row, cell.row), "LoRA" if "LoRA" in cell.printed else "full"


def recomputed(cell: Cell) -> Range | None:
    if cell.table == "002-train":
        return exactly(training_gb(cell.row)) if cell.column == "Full Fine-tune" else None
    if cell.table == "002-infer":
        if cell.column != "FP16":
            return None  # its figures carry an overhead that it does not state
        return exactly(MODELS[cell.row][0] * BYTES[cell.column] / GB)
    if cell.table == "002-infer-batch":
        size, kind = cell.row.split()
        return exactly(inference_gb(size, BYTES[kind], int(cell.column.removeprefix("Batch="))))
    if cell.table == "002-config":
        each = {"Full FT, FP32": 16, "Full FT, FP16": 8}
        return exactly(each[cell.row] * MODELS[cell.column][0] / GB) if cell.row in each else None
    if cell.table in ("002-vram-guide", "002-model-guide", "002-hw"):
        return exactly(printed_training_gb(*guide_key(cell)))
    if cell.table == "002-gpus":
        gpu = find_gpu(cell.row)
        # the printed sizes are makers' names for cards
        return exactly(gpu.bf16_flops / 1e12) if cell.column == "FP16 TFLOPs" else cell.value
    return _single(cell)


def _single(cell: Cell) -> Range | None:
    """Lines outside of tables."""
    params, width, _ = MODELS["7B"]
    values = {
        "model": 2 * params / GB,
        "optimizer (AdamW, FP32 states)": 8 * params / GB,
        "gradient": 2 * params / GB,
        "activation": LENGTH * width * 2 / GB,
        "total before optimization": training_gb("7B"),
        "GRPO generation buffers, 4 x 256": 2 * width * 4 * 256 * 2 / GB,
        "KV cache 7B, batch 8, seq 2048, FP16": 2 * width * 8 * LENGTH * 2 / GB,
        "Full FT 56 GB -> LoRA 16 GB": 100 * (1 - 16 / 56),
        "gradient checkpointing speed penalty %": 100 / 3,  # one more forward pass: a third of forward and backward
        "8-bit reduction %": 50.0,
        "4-bit reduction %": 75.0,
    }
    key = cell.row if cell.row in values else cell.column
    return exactly(values[key]) if key in values else None


def floor(cell: Cell) -> float | None:
    """GB of the bfloat16 weights that LoRA trains beside: no LoRA run needs less."""
    if cell.table == "002-train" and cell.column == "LoRA":
        return 2 * MODELS[cell.row][0] / GB
    if cell.table == "002-config" and cell.row.startswith("LoRA"):
        return 2 * MODELS[cell.column][0] / GB
    if cell.table == "002-expected" and "LoRA" in cell.row:
        return 2 * MODELS["7B"][0] / GB
    return None


def planned(cell: Cell) -> Answer | None:
    if cell.table == "002-train":
        return _training(MODELS[cell.row][2], METHOD_OF[cell.column])
    if cell.table == "002-config":
        method = CONFIG_METHODS[cell.row.split(",")[0]]
        recompute = "full" if "Ckpt" in cell.row or method == "full" else "none"
        return _training(MODELS[cell.column][2], method, recompute)
    if cell.table in ("002-vram-guide", "002-hw"):
        size, method = guide_key(cell)
        return _training(MODELS[size][2], method)
    if cell.table == "002-model-guide":
        return _training(GUIDE_MODELS[cell.row][1], GUIDE_METHODS[cell.column])
    if cell.table == "002-infer":
        return _inference(cell.row, cell.column, 0)
    if cell.table == "002-infer-batch":
        size, kind = cell.row.split()
        return _inference(size, kind, int(cell.column.removeprefix("Batch=")))
    if cell.table == "002-gpus":
        gpu = find_gpu(cell.row)
        if cell.column == "FP16 TFLOPs":
            return Answer(exactly(gpu.bf16_flops / 1e12), f"dense tensor cores: {gpu.source}")
        return Answer(exactly(gpu.memory / GB), f"{gpu.memory / GIB:.1f} GiB in nvidia-smi")
    if cell.table == "002-expected" and ("GRPO LoRA" in cell.row or "GSPO LoRA" in cell.row):
        return _grpo_with_lora(cell)
    return _single_planned(cell)


def _grpo_with_lora(cell: Cell) -> Answer:
    """One sequence of 256 + 256 tokens a micro-batch, four at once in an engine that shares the GPU; no critic."""
    length, recompute = 512, "full" if "ckpt" in cell.row else "none"
    engine = Engine(max_cache_tokens=4 * length, sequence=length, max_sequences=4, graph_batch=4, prefill_tokens=length)
    job = single_gpu_job(find_model("llama-2-7b"), METHODS["LoRA"], find_gpu("a100-80g"))
    batch = Batch(length, length, recompute=recompute)
    # the reference is the same model with its adapters off
    plan = make_plan(replace(job, algorithm="grpo", batch=batch, engine=engine))
    basis = f"{job.model.name} on {job.gpu.name}: its weights twice, in trainer and engine; recompute {recompute}"
    return Answer(exactly(plan.peak / GB), basis)


def _training(model: str, method: str, recompute: str = "full") -> Answer:
    job = single_gpu_job(find_model(model), METHODS[method], Gpu("one GPU", float("inf"), 0, 0, 0, 0, "any"))
    batch = Batch(LENGTH, LENGTH, logit_tokens=512, recompute=recompute)
    plan = make_plan(replace(job, batch=batch))
    return Answer(exactly(plan.peak / GB), f"{job.model.name}, 1 x {LENGTH} tokens, recompute {recompute}")


def _inference(size: str, kind: str, batch: int) -> Answer:
    shape = find_model(MODELS[size][2])
    weights = base_weights(shape, Adapter(quantization=QUANTIZATION[kind])).value
    cache = cache_bytes_per_token(shape, 1, 2).value * batch * LENGTH
    basis = f"{shape.name}, embeddings and head stay bfloat16" if QUANTIZATION[kind] else shape.name
    return Answer(exactly((weights + cache) / GB), f"{basis}, cache of {batch} sequences" if batch else basis)


def _single_planned(cell: Cell) -> Answer | None:
    shape = find_model("llama-2-7b")
    batch = Batch(LENGTH, LENGTH, recompute="none", logit_tokens=512)
    kept = training_activations(shape, TorchLayout(), batch, EAGER, 2)
    full = training_activations(shape, TorchLayout(), Batch(LENGTH, LENGTH), EAGER, 2).stored.value
    cache = cache_bytes_per_token(shape, 1, 2).value * 8 * LENGTH / GB
    values = {
        "model": (2 * shape.num_params / GB, "2 bytes a parameter"),
        "optimizer (AdamW, FP32 states)": (12 * shape.num_params / GB, "with float32 master weights"),
        "gradient": (2 * shape.num_params / GB, "2 bytes a parameter"),
        "activation": (kept.stored.value / GB, "all that the backward pass needs"),
        "total before optimization": (_training("llama-2-7b", "full", "none").value.low, "16 bytes a parameter"),
        "KV cache 7B, batch 8, seq 2048, FP16": (cache, shape.name),
        "gradient checkpointing memory saving %": (100 * (1 - full / kept.stored.value), "of stored activations"),
        "gradient checkpointing speed penalty %": (
            100 * (training_flops(shape, LENGTH, recompute="full") / training_flops(shape, LENGTH) - 1),
            "one more forward pass",
        ),
        "mixed precision memory saving %": (0.0, "16 bytes a parameter either way; only activations shrink"),
        "LoRA reduces trainable parameters by at least %": (
            100 * (1 - lora_params(shape, Adapter()) / shape.num_params),
            "rank 16 on all matrices",
        ),
    }
    key = cell.row if cell.row in values else cell.column
    if key not in values:
        return None
    value, basis = values[key]
    return Answer(exactly(value), basis)
