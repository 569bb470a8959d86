"""One rank of the test that a step without a finite loss or gradient changes nothing, on any backend."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo  # before DeepSpeed builds a model
import torch.distributed as dist
from oracle import CPU, CUTS, HEADS, NUM_STEPS, batch, settings, trained

from rlhf_mp.cluster.ranks import leave_ranks
from rlhf_mp.config.schema import ActorConfig, DeepSpeedConfig, ModelConfig, OffloadConfig
from rlhf_mp.data.types import LossFn, Totals
from rlhf_mp.planner.term import Component
from rlhf_mp.train.base import TrainEngine

VOCAB = 11
SMALL = {"param_persistence_threshold": 0}
DEEPSPEED = {
    "stage 0": ("float32", OffloadConfig(), {"zero_stage": 0}),
    "stage 0, bfloat16": ("bfloat16", OffloadConfig(), {"zero_stage": 0}),
    "stage 1": ("float32", OffloadConfig(), {"zero_stage": 1}),
    "stage 2, bfloat16": ("bfloat16", OffloadConfig(), {"zero_stage": 2}),
    "stage 2, offload": ("float32", OffloadConfig(optimizer_offload=True), {"zero_stage": 2}),
    "stage 3": ("float32", OffloadConfig(), {"zero_stage": 3} | SMALL),
    "stage 3, offload": ("float32", OffloadConfig(True, True), {"zero_stage": 3} | SMALL),
    "stage 3, offload, some whole": ("float32", OffloadConfig(True, True), {"zero_stage": 3}),
    "stage 3, offload, bfloat16": ("bfloat16", OffloadConfig(True, True), {"zero_stage": 3} | SMALL),
}
MEGATRON = {
    "TP2": ("float32", {"tensor_model_parallel_size": 2}),
    "PP2": ("float32", {"pipeline_model_parallel_size": 2}),
    "PP2 VPP2": ("float32", {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "DP2": ("float32", {}),
    "DP2 plain optimizer": ("float32", {"use_distributed_optimizer": False}),
    "DP2 bfloat16": ("bfloat16", {}),
    "TP2 bfloat16, optimizer on the host": (
        "bfloat16",
        {"tensor_model_parallel_size": 2, "offload": OffloadConfig(optimizer_offload=True)},
    ),
}


def harmful(loss_fn: LossFn, where: str, dp_rank: int) -> LossFn:
    """On one data-parallel rank alone, in its first micro-batch."""
    calls = []

    def loss_of(output, batch, totals):
        calls.append(1)
        loss, metrics = loss_fn(output, batch, totals)
        if dp_rank != 1 and len(calls) == 1:
            bad = {"loss": loss * torch.nan, "gradient": loss + (output.logprobs[:1, 2:3] * 0).sqrt().sum()}
            return bad[where], metrics
        return loss, metrics

    return loss_of


def step(engine: TrainEngine, number: int, loss_fn: LossFn) -> dict[str, tuple[float, float]]:
    whole = batch(number, VOCAB)
    cut = CUTS[engine.layout.dp_size][engine.layout.dp_rank]
    return engine.train_step([whole.select(rows) for rows in cut], Totals(int(whole.mask.sum()), 6), loss_fn)


def state(engine: TrainEngine) -> list[torch.Tensor]:
    kinds = (Component.weights, Component.master, Component.optimizer)
    return [tensor.detach().clone() for component, tensor in engine.tensors() if component in kinds]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) > 0 and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def run_case(build: Callable[[], TrainEngine]) -> dict[str, bool]:
    """Two steps, two that are harmed, and two more, against four that are not."""
    _, loss_fn = HEADS["actor"]
    engine = build()
    for number in range(2):
        step(engine, number, loss_fn)
    before, unchanged, norms = state(engine), True, []
    for where in ("loss", "gradient"):
        norms.append(step(engine, 7, harmful(loss_fn, where, engine.layout.dp_rank))["grad_norm"][0])
        unchanged &= equal(state(engine), before)
    after = [step(engine, number, loss_fn) for number in (2, 3)]
    ended = state(engine)
    straight = build()
    expected = [step(straight, number, loss_fn) for number in range(4)][2:]
    return {
        "skipped": not any(math.isfinite(norm) for norm in norms),
        "unchanged": unchanged,
        "goes on as if it had not been": after == expected and equal(ended, state(straight)),
        "trained": not equal(ended, before) and all(math.isfinite(m["grad_norm"][0]) for m in expected),
    }


def deepspeed_case(model: str, dtype: str, offload: OffloadConfig, knobs: dict) -> Callable[[], TrainEngine]:
    from rlhf_mp.train.deepspeed_engine import DeepSpeedEngine

    config: ActorConfig = trained(offload, DeepSpeedConfig(**knobs))
    forward = settings("actor")
    weights = getattr(torch, dtype)
    return lambda: DeepSpeedEngine(lambda: forward.head.load(model, weights), forward, config, NUM_STEPS, dtype)


def megatron_case(model: str, dtype: str, knobs: dict) -> Callable[[], TrainEngine]:
    from megatron.core import parallel_state

    from rlhf_mp.train.megatron_engine import MegatronEngine

    parallel_state.destroy_model_parallel()
    own = ModelConfig(path=model, dtype=dtype, enable_gradient_checkpointing=False)
    return lambda: MegatronEngine(own, settings("actor"), trained(**knobs), NUM_STEPS)


def on_all_ranks(own: dict[str, bool]) -> dict[str, bool]:
    ranks = [own] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return {key: all(rank[key] for rank in ranks) for key in own}


def main(backend: str, model: str, out: str) -> None:
    """Writes what was found of each case."""
    if backend == "megatron":
        from rlhf_mp.train import megatron_cpu

        megatron_cpu.install()
        from rlhf_mp.train.megatron_engine import init_distributed

        init_distributed(CPU)
        report = {name: on_all_ranks(run_case(megatron_case(model, *case))) for name, case in MEGATRON.items()}
    else:
        from rlhf_mp.train.deepspeed_engine import init_distributed

        init_distributed()
        report = {name: on_all_ranks(run_case(deepspeed_case(model, *case))) for name, case in DEEPSPEED.items()}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(report))
    leave_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
