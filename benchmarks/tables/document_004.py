"""Document 004: a trained model beside an evaluator, by batch size."""

from benchmarks.tables.cells import Answer, Cell, Range, exactly
from rlhf_mp.planner.activations import training_activations
from rlhf_mp.planner.amount import GB, GIB
from rlhf_mp.planner.hardware import find_gpu
from rlhf_mp.planner.job import EAGER, Adapter, Batch, TorchLayout
from rlhf_mp.planner.known_models import find_model
from rlhf_mp.planner.states import base_weights

LENGTH = 1024  # assumed: the document names no length
CARDS_GB = {"H200": 141.0, "H100": 80.0, "A100": 80.0, "L40S": 48.0}  # as their makers print them


def large_total(batch: float) -> Range:
    """14 GB of weights, 42-50 of overhead, 28 of evaluator, 10-15 of activations at batch 8."""
    return Range(84 + 10 / 8 * batch, 92 + 15 / 8 * batch)


def small_total(batch: float) -> Range:
    """1 GB, 3-4, 1, and 8-15 at batch 128."""
    return Range(5 + 8 / 128 * batch, 6 + 15 / 128 * batch)


def recomputed(cell: Cell) -> Range | None:
    small = cell.table.endswith("05b")
    if cell.table in ("004-batch", "004-batch-05b"):
        batch = float(cell.row.removeprefix("batch "))
        whole, none = (small_total if small else large_total)(batch), (small_total if small else large_total)(0)
        return whole if cell.column == "Total Memory" else Range(whole.low - none.low, whole.high - none.high)
    if cell.table in ("004-gpus", "004-gpus-05b"):
        return exactly(CARDS_GB[cell.row])
    values = {
        "7B Training Model (bf16)": exactly(14),
        "14B Evaluator Model (bf16, inference only)": exactly(28),
        "0.5B Training Model (bf16)": exactly(1),
        "0.5B Evaluator Model (bf16, inference only)": exactly(1),
        "Total": small_total(128) if small else large_total(8),
    }
    header = {
        "8": large_total(8),
        "128": large_total(128),
        "14B evaluator bf16": exactly(28),
        "14B evaluator 8-bit": exactly(14),
        "0.5B batch 128": small_total(128),
    }
    if cell.table == "004-header":
        return header[cell.row]
    return values.get(cell.column)  # None: the document gives no formula


def planned(cell: Cell) -> Answer | None:
    small = cell.table.endswith("05b")
    trained = find_model("qwen2.5-0.5b" if small else "qwen2.5-7b")
    evaluator = trained if small else find_model("qwen2.5-14b")
    if cell.table in ("004-batch", "004-batch-05b"):
        tokens = int(cell.row.removeprefix("batch ")) * LENGTH
        low, high = (
            training_activations(trained, TorchLayout(), batch, EAGER, 2).peak / GB
            for batch in (Batch(tokens, LENGTH, logit_tokens=1024), Batch(tokens, LENGTH, recompute="none"))
        )
        states = 0.0
        if cell.column == "Total Memory":
            states = (16 * trained.num_params + 2 * evaluator.num_params) / GB
        basis = f"{LENGTH} tokens a sequence (assumed); checkpoints and chunked logits to neither"
        return Answer(Range(states + low, states + high), basis)
    if cell.table in ("004-gpus", "004-gpus-05b"):
        gpu = find_gpu(cell.row)
        return Answer(exactly(gpu.memory / GB), f"{gpu.name}, {gpu.memory / GIB:.1f} GiB in nvidia-smi")
    quantized = base_weights(find_model("qwen2.5-14b"), Adapter(quantization="int8")).value
    values = {
        "7B Training Model (bf16)": 2 * trained.num_params,
        "0.5B Training Model (bf16)": 2 * trained.num_params,
        "14B Evaluator Model (bf16, inference only)": 2 * evaluator.num_params,
        "0.5B Evaluator Model (bf16, inference only)": 2 * evaluator.num_params,
        "14B evaluator bf16": 2 * evaluator.num_params,
        "14B evaluator 8-bit": quantized,
        "Training Overhead (gradients, optimizer, activations)": 14 * trained.num_params,
    }
    key = cell.row if cell.table == "004-header" else cell.column
    return (
        Answer(exactly(values[key] / GB), trained.name if "Train" in key else evaluator.name) if key in values else None
    )
