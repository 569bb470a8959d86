"""One rank of the parity test: every ZeRO stage and offload against TorchEngine on the same batches, in one launch."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch._dynamo  # before DeepSpeed builds a model
import torch.distributed as dist
from oracle import NUM_STEPS, Oracle, largest_difference, settings, summed_over_ranks, trained
from torch import nn

from rlhf_mp.cluster.ranks import leave_ranks
from rlhf_mp.config.schema import ActorConfig, DeepSpeedConfig, OffloadConfig
from rlhf_mp.train.checkpointing import checkpoint_layers
from rlhf_mp.train.deepspeed_engine import DeepSpeedEngine, DeepSpeedScorer, init_distributed


def case(stage: int, param_offload: bool, optimizer_offload: bool) -> ActorConfig:
    offload = OffloadConfig(param_offload=param_offload, optimizer_offload=optimizer_offload)
    return trained(offload, DeepSpeedConfig(zero_stage=stage, param_persistence_threshold=0))


CASES = [
    (0, False, False), (1, False, False), (1, False, True), (2, False, False), (2, False, True), (3, False, False),
    (3, False, True), (3, True, True),
]  # fmt: skip
PACKED = (3, True, True)  # the case that is run without padding, and with activations on the host, too


def builder(
    oracle: Oracle, dtype: torch.dtype = torch.float32, *, packed: bool = False, selective: bool = False
) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        module = oracle.build(settings(oracle.role, packed=packed).head, dtype)
        if selective:
            checkpoint_layers(module, every=1, recompute="selective")
        return module

    return build


def run_case(oracle: Oracle, config: ActorConfig, *, packed: bool = False, selective: bool = False) -> dict[str, float]:
    build = builder(oracle, packed=packed, selective=selective)
    forward = settings(oracle.role, packed=packed)
    forward = replace(forward, offload_layers=1 if packed else None)
    engine = DeepSpeedEngine(build, forward, config, NUM_STEPS, "float32")
    found = oracle.compare(oracle.train(engine), engine)
    found["score"] = largest_difference(engine.score(oracle.scored), oracle.score)
    engine.engine.destroy()
    return found


def frozen(oracle: Oracle) -> float:
    config, offload = case(3, False, False), OffloadConfig(param_offload=True)
    scorer = DeepSpeedScorer(builder(oracle), settings(oracle.role), config, offload, "float32")
    return largest_difference(scorer.score(oracle.scored), oracle.first_score)


def in_bfloat16(oracle: Oracle) -> dict[str, list[float]]:
    """ZeRO-3 with both offloads, as large models are trained."""
    half = builder(oracle, torch.bfloat16)
    engine = DeepSpeedEngine(half, settings(oracle.role), case(3, True, True), NUM_STEPS, "bfloat16")
    found = oracle.train(engine)
    return {"loss": summed_over_ranks(found["loss"]).tolist(), "grad_norm": found["grad_norm"]}


def report_of(oracle: Oracle) -> dict:
    name = "stage {}, param_offload {}, optimizer_offload {}"
    cases = {name.format(*knobs): run_case(oracle, case(*knobs)) for knobs in CASES}
    cases[f"{name.format(*PACKED)}, packed, activations on the host"] = run_case(oracle, case(*PACKED), packed=True)
    some_whole = trained(OffloadConfig(True, True), DeepSpeedConfig(zero_stage=3))
    cases[f"{name.format(*PACKED)}, selective recomputation"] = run_case(oracle, some_whole, selective=True)
    return {
        "cases": cases,
        "frozen": frozen(oracle),
        "loss": oracle.trained["loss"],
        "smallest_move": oracle.smallest_move(),
        "bfloat16": in_bfloat16(oracle),
    }


def main(out: str, *models: str) -> None:
    """Writes what it found of ``role=path`` ..., by role."""
    init_distributed()
    found = {role: report_of(Oracle(role, path)) for role, path in (model.split("=", 1) for model in models)}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    leave_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
