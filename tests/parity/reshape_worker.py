"""One rank of the test that a run goes on with another number of ranks: saves half-way, or goes on to the end."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch._dynamo  # before DeepSpeed builds a model
import torch.distributed as dist
from oracle import CPU, NUM_STEPS, Oracle, settings, trained, worst

from rlhf_mp.cluster.ranks import leave_ranks
from rlhf_mp.config.schema import DeepSpeedConfig, ModelConfig, OffloadConfig
from rlhf_mp.train.base import TrainEngine

HALF = NUM_STEPS // 2
DEEPSPEED = {
    "stage 0": (0, OffloadConfig()),
    "stage 1": (1, OffloadConfig()),
    "stage 2, offload": (2, OffloadConfig(optimizer_offload=True)),
    "stage 3": (3, OffloadConfig()),
    "stage 3, offload": (3, OffloadConfig(True, True)),
}
ADAPTERS = ["stage 2, offload", "stage 3, offload"]
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
LAYOUTS = {"TP2": TP2, "PP2": PP2, "DP2": {}, "one rank": {}, "TP2 PP2 SP": TP2 | PP2 | {"sequence_parallel": True}}
MEGATRON = {  # by the number of ranks: what they save, and what of whom they go on with
    1: ([], [("TP2", "one rank"), ("PP2", "one rank")]),
    2: (["TP2", "PP2"], [("TP2", "PP2"), ("TP2", "DP2"), ("TP2 PP2 SP", "DP2"), ("TP2 PP2 SP", "TP2")]),
    4: (["TP2 PP2 SP"], []),
}


@contextmanager
def deepspeed_engine(oracle: Oracle, name: str) -> Iterator[TrainEngine]:
    from rlhf_mp.train.deepspeed_engine import DeepSpeedEngine

    stage, offload = DEEPSPEED[name]
    config = trained(offload, DeepSpeedConfig(zero_stage=stage, param_persistence_threshold=100))
    forward = settings(oracle.role)
    build = partial(oracle.build, forward.head, torch.float32)
    engine = DeepSpeedEngine(build, forward, config, NUM_STEPS, "float32")
    yield engine
    engine.engine.destroy()


@contextmanager
def megatron_engine(oracle: Oracle, name: str) -> Iterator[TrainEngine]:
    from megatron.core import parallel_state

    from rlhf_mp.train.megatron_engine import MegatronEngine

    model = ModelConfig(path=oracle.path, dtype="float32", enable_gradient_checkpointing=False)
    yield MegatronEngine(model, settings(oracle.role), trained(**LAYOUTS[name]), NUM_STEPS)
    parallel_state.destroy_model_parallel()


def run(backend: str, task: str, oracle: Oracle, folder: Path) -> dict[str, dict[str, float]]:
    engine_of = megatron_engine if backend == "megatron" else deepspeed_engine
    if backend != "megatron":
        saved = ADAPTERS if backend == "lora" else [*DEEPSPEED]
        resumed = [(name, name) for name in saved]
    else:
        saved, resumed = MEGATRON[dist.get_world_size()]
    if task == "save":
        for name in saved:
            with engine_of(oracle, name) as engine:
                oracle.train(engine, range(HALF))
                engine.save(folder / name)
        return {}
    found = {}
    for before, name in resumed:
        if (folder / before).is_dir():
            with engine_of(oracle, name) as engine:
                engine.load(folder / before)
                compared = oracle.compare(oracle.train(engine, range(HALF, NUM_STEPS)), engine, HALF)
                found[f"{before} -> {name}"] = worst(compared)
    return found


def main(backend: str, task: str, model: str, folder: str) -> None:
    """``save`` writes to the folder; ``load`` reads from it and writes ``found.json``."""
    if backend == "megatron":
        from rlhf_mp.train import megatron_cpu

        megatron_cpu.install()
        from rlhf_mp.train.megatron_engine import init_distributed

        init_distributed(CPU)
    else:
        from rlhf_mp.train.deepspeed_engine import init_distributed

        init_distributed()
    kind = Oracle
    if backend == "lora":
        from lora_worker import AdapterOracle as kind
    oracle = kind("actor", model)
    found = run(backend, task, oracle, Path(folder))
    if dist.get_rank() == 0 and task == "load":
        text = json.dumps({"cases": found, "smallest_move": oracle.smallest_move()})
        Path(folder, f"found_{dist.get_world_size()}.json").write_text(text)
    leave_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
