"""\"I have so much memory, what can I train?\" and "I want to train this model, what do I need?" """

from dataclasses import dataclass

from rlhf_mp.planner.amount import GIB
from rlhf_mp.planner.hardware import GPUS, USABLE, Gpu
from rlhf_mp.planner.job import Adapter, Batch, Job, ZeroLayout
from rlhf_mp.planner.known_models import KNOWN_MODELS
from rlhf_mp.planner.model_shape import ModelShape
from rlhf_mp.planner.plan import Plan, make_plan

METHODS: dict[str, Adapter | None] = {
    "full": None,
    "LoRA": Adapter(),
    "QLoRA": Adapter(quantization="nf4"),
}
TOKENS = 2048  # one sequence, as in the tables of documents 002 and 004
LOGIT_TOKENS = 512  # a chunk: without chunks a large vocabulary outweighs a small model
GPU_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Need:
    """What one way of training takes on one GPU, and the fewest GPUs of a kind that hold it."""

    method: str
    plan: Plan
    num_gpus: dict[str, int | None]  # by card; None: more than 128


def spread_job(shape: ModelShape, adapter: Adapter | None, gpu: Gpu, num_gpus: int) -> Job:
    """Supervised steps of one sequence a GPU with checkpointing, the least a method needs; on several by ZeRO-3."""
    batch = Batch(TOKENS, TOKENS, logit_tokens=LOGIT_TOKENS)
    layout = ZeroLayout(num_gpus, stage=3 if num_gpus > 1 else 0)
    return Job(shape, layout, batch, gpu, algorithm="sft", adapter=adapter, reference=False)


def single_gpu_job(shape: ModelShape, adapter: Adapter | None, gpu: Gpu) -> Job:
    return spread_job(shape, adapter, gpu, 1)


def what_fits(memory: float) -> dict[str, list[Plan]]:
    """For each method, the known models that train on a card of ``memory`` bytes, the largest first."""
    card = Gpu(f"a card of {memory / GIB:.1f} GiB", memory, 0, 0, 0, 0, "given")
    shapes = sorted(KNOWN_MODELS.values(), key=lambda shape: -shape.num_params)
    plans = {name: [make_plan(single_gpu_job(s, adapter, card)) for s in shapes] for name, adapter in METHODS.items()}
    return {name: [plan for plan in found if plan.fits] for name, found in plans.items()}


def what_needs(shape: ModelShape) -> list[Need]:
    """Memory on a single card, and how many of each card, for every method."""
    needs = []
    for name, adapter in METHODS.items():
        unlimited = Gpu("one GPU", float("inf"), 0, 0, 0, 0, "given")
        plan = make_plan(single_gpu_job(shape, adapter, unlimited))
        needs.append(Need(name, plan, {gpu.name: fewest_gpus(shape, adapter, gpu) for gpu in GPUS.values()}))
    return needs


def fewest_gpus(shape: ModelShape, adapter: Adapter | None, gpu: Gpu) -> int | None:
    """GPUs over which ZeRO-3 spreads it so that it fits."""
    return next((n for n in GPU_COUNTS if make_plan(spread_job(shape, adapter, gpu, n)).fits), None)


def describe_fits(memory: float) -> str:
    """A table of what trains on one card."""
    lines = [
        f"one card of {memory / GIB:.1f} GiB = {memory / 1e9:.1f} GB, of which {USABLE:.0%} are planned with; "
        f"supervised steps of 1 x {TOKENS} tokens, bfloat16 with float32 Adam, full recompute, chunked logits",
        "",
        f"{'method':<8}{'largest model':<18}{'needs':>12}  others that fit",
    ]
    for method, plans in what_fits(memory).items():
        if not plans:
            lines.append(f"{method:<8}none of {len(KNOWN_MODELS)} known models")
            continue
        others = ", ".join(plan.job.model.name for plan in plans[1:7])
        lines.append(f"{method:<8}{plans[0].job.model.name:<18}{plans[0].peak / GIB:>8.1f} GiB  {others}")
    return "\n".join(lines)


def describe_needs(shape: ModelShape) -> str:
    """A table of what it takes to train one model."""
    cards = ("RTX4090", "L40S", "A100-40G", "A100-80G", "H200")
    lines = [
        f"{shape.name}, {shape.num_params / 1e9:.2f}e9 parameters: supervised steps of 1 x {TOKENS} tokens a GPU",
        "",
        f"{'method':<8}{'on one GPU':>28}" + "".join(f"{name:>12}" for name in cards),
    ]
    for need in what_needs(shape):
        counts = "".join(f"{f'{need.num_gpus[c]} x' if need.num_gpus[c] else 'over 128':>12}" for c in cards)
        size = f"{need.plan.peak / GIB:.1f} GiB = {need.plan.peak / 1e9:.1f} GB"
        lines.append(f"{need.method:<8}{size:>28}{counts}")
    lines += [
        "",
        "Several GPUs: ZeRO-3. Sampling during training (GRPO, PPO) comes on top: --model ... --algorithm grpo.",
    ]
    return "\n".join(lines)
