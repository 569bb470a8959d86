"""Which layouts a model fits on given GPUs, the fastest first, and why the others do not."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from rlhf_mp.errors import ConfigError, Problem
from rlhf_mp.planner.hardware import NETWORK_RATE, Gpu
from rlhf_mp.planner.job import (
    BF16,
    BF16_FP32_GRADS,
    EAGER,
    FUSED,
    Batch,
    Engine,
    Job,
    Layout,
    MegatronLayout,
    Workload,
    ZeroLayout,
    with_optimizer,
)
from rlhf_mp.planner.model_shape import ModelShape
from rlhf_mp.planner.plan import Plan, make_plan
from rlhf_mp.planner.throughput import StepTime, step_time

TOKENS = (32768, 16384, 8192, 4096)
WIDTHS = (1, 2, 4, 8)
FRACTIONS = (0.7, 0.5, 0.35, 0.25)


@dataclass(frozen=True)
class Question:
    """What is asked: this model, on so many of these cards."""

    model: ModelShape
    gpu: Gpu
    num_gpus: int
    algorithm: str = "grpo"
    workload: Workload = Workload()
    gpus_per_node: int = 8
    backends: tuple[str, ...] = ("deepspeed", "megatron")
    host_memory: float | None = None
    engines_sleep: bool = False
    tp: int | None = None  # of Megatron; None: tried
    pp: int | None = None
    rollout_tp: int | None = None
    optimizer: str = "adamw"
    network_rate: float = NETWORK_RATE
    reward_model: ModelShape | None = None
    price: float | None = None  # of a GPU and hour, in whatever currency


@dataclass(frozen=True)
class Found:
    """One layout with its best batch and engine."""

    plan: Plan
    time: StepTime


@dataclass(frozen=True)
class Refused:
    layout: Layout
    reason: str


def question_problems(question: Question) -> Iterator[Problem]:
    """Numbers that no layout can satisfy, with the nearest that one can."""
    shape, gpus, load = question.model, question.num_gpus, question.workload
    least_one = {
        "--num-gpus": (gpus, "nothing runs on no GPU"),
        "--gpus-per-node": (question.gpus_per_node, "a machine without GPUs"),
        "--prompts": (load.prompts, "a step without prompts"),
        "--responses": (load.responses, "a step without responses"),
        "--prompt-tokens": (load.prompt_tokens, "a prompt without tokens"),
        "--response-tokens": (load.response_tokens, "a response without tokens"),
    }
    bad = [Problem(key, n, reason, f"{key} 1 or more") for key, (n, reason) in least_one.items() if n < 1]
    if bad:
        yield from bad
        return
    for key, rate in (("--network-gbit", question.network_rate), ("--price-per-gpu-hour", question.price)):
        if rate is not None and rate <= 0:
            yield Problem(key, rate, "is not above 0", f"leave {key} out")
    if "megatron" not in question.backends:
        for key, value in (("--tp", question.tp), ("--pp", question.pp)):
            if value is not None:
                yield Problem(key, value, "is Megatron's; DeepSpeed shares by ZeRO", "--backend megatron, or leave it")
    length = load.prompt_tokens + load.response_tokens
    if shape.max_context and length > shape.max_context:
        reason = f"with the prompt {length:,} tokens, more than {shape.name}'s {shape.max_context:,}"
        fix = f"--response-tokens {max(1, shape.max_context - load.prompt_tokens)}"
        yield Problem("--response-tokens", load.response_tokens, reason, fix)
    if gpus > question.gpus_per_node and gpus % question.gpus_per_node:
        whole = max(1, round(gpus / question.gpus_per_node)) * question.gpus_per_node
        reason = f"is not a whole number of machines with {question.gpus_per_node} GPUs"
        yield Problem("--num-gpus", gpus, reason, f"--num-gpus {whole}, or --gpus-per-node {gpus}")
    for name, value, count, what in (
        ("--tp", question.tp, shape.heads, "attention heads"),
        ("--rollout-tp", question.rollout_tp, shape.heads, "attention heads"),
        ("--pp", question.pp, shape.layers, "layers"),
    ):
        if value is None:
            continue
        fix = f"{name} {_nearest_divisor(math.gcd(count, gpus), value)}"
        if value < 1 or count % value:
            yield Problem(name, value, f"does not divide the model's {count} {what}", fix)
        elif gpus % value:
            yield Problem(name, value, f"does not divide {gpus} GPUs", fix)


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: (abs(d - wanted), d))


def search(question: Question) -> tuple[list[Found], list[Refused]]:
    """Layouts that fit, by seconds a step, and those that do not.

    Raises:
        ConfigError: the question itself cannot be answered, see ``question_problems``.
    """
    if problems := list(question_problems(question)):
        raise ConfigError(problems)
    outcomes = []
    for layout in layouts(question):
        outcome = _best(question, layout)
        if isinstance(outcome, Refused) and isinstance(layout, MegatronLayout):
            outcome = _best(question, replace(layout, optimizer_offload=True))
        outcomes.append(outcome)
    found = [outcome for outcome in outcomes if isinstance(outcome, Found)]
    refused = [outcome for outcome in outcomes if isinstance(outcome, Refused)]
    return sorted(found, key=lambda f: f.time.total), refused


def _best(question: Question, layout: Layout) -> Found | Refused:
    """The fastest way to use a layout that fits, or why none does."""
    fitting, closest = None, None
    for job in _variants(question, layout):
        plan = make_plan(job)
        if plan.fits:
            candidate = Found(plan, step_time(plan, question.workload))
            if fitting is None or candidate.time.total < fitting.time.total:
                fitting = candidate
        elif closest is None or plan.peak < closest.peak:
            closest = plan
    if fitting is not None:
        return fitting
    return Refused(layout, closest.problems[0] if closest else "no engine layout divides the GPUs")


def layouts(question: Question) -> Iterator[Layout]:
    """ZeRO stages with every offload, and Megatron's ways to divide the GPUs, without any."""
    gpus = question.num_gpus
    if "deepspeed" in question.backends and question.tp is None and question.pp is None:
        for stage, (parameters, optimizer) in product((2, 3), ((False, False), (False, True), (True, True))):
            if stage == 3 or not parameters:
                yield ZeroLayout(gpus, stage, param_offload=parameters, optimizer_offload=optimizer)
    if "megatron" not in question.backends:
        return
    for tp, pp in product(
        WIDTHS if question.tp is None else (question.tp,), WIDTHS if question.pp is None else (question.pp,)
    ):
        if tp > question.gpus_per_node:
            continue
        if gpus % (tp * pp) == 0 and question.model.heads % tp == 0 and question.model.layers % pp == 0:
            yield MegatronLayout(gpus, tp, pp)


def _variants(question: Question, layout: Layout) -> Iterator[Job]:
    megatron = isinstance(layout, MegatronLayout)
    sequence = question.workload.prompt_tokens + question.workload.response_tokens
    base = Job(
        model=question.model,
        layout=layout,
        batch=Batch(tokens=sequence, sequence=sequence),
        gpu=question.gpu,
        algorithm=question.algorithm,
        precision=with_optimizer(BF16_FP32_GRADS if megatron else BF16, question.optimizer),
        kernels=FUSED if megatron else EAGER,
        reference=question.algorithm != "sft",
        critic=question.model if question.algorithm == "ppo" else None,
        reward_model=question.reward_model,
        host_memory=question.host_memory,
        ranks_per_node=question.gpus_per_node,
        network_rate=question.network_rate,
    )
    tokens = [count for count in TOKENS if count >= sequence] or [sequence]
    for count, recompute in product(tokens, ("full", "none")):
        job = replace(base, batch=Batch(count, sequence, recompute=recompute))
        if question.algorithm == "sft":
            yield job
            continue
        for engine in _engines(question, sequence):
            yield replace(job, engine=engine)


def _engines(question: Question, sequence: int) -> Iterator[Engine]:
    for tp in WIDTHS if question.rollout_tp is None else (question.rollout_tp,):
        if question.num_gpus % tp or question.model.heads % tp or tp > question.gpus_per_node:
            continue
        for fraction in FRACTIONS:
            yield Engine(
                tp, question.num_gpus // tp, memory_fraction=fraction, sequence=sequence, sleeps=question.engines_sleep
            )
