"""One rank of the parity test of SGD: what each backend makes of it against torch's own, resumed half-way."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch._dynamo  # before DeepSpeed builds a model
import torch.distributed as dist
from oracle import CPU, NUM_STEPS, Oracle, settings, trained, worst

from rlhf_mp.cluster.ranks import leave_ranks
from rlhf_mp.config.schema import DeepSpeedConfig, ModelConfig, OffloadConfig, OptimConfig
from rlhf_mp.planner.term import Component
from rlhf_mp.train.base import TrainEngine

DEEPSPEED = {
    "stage 0": (OffloadConfig(), 0),
    "stage 1": (OffloadConfig(), 1),
    "stage 2, offload": (OffloadConfig(optimizer_offload=True), 2),
    "stage 3": (OffloadConfig(), 3),
    "stage 3, offload": (OffloadConfig(True, True), 3),
}
MEGATRON = {"TP2": {"tensor_model_parallel_size": 2}, "PP2": {"pipeline_model_parallel_size": 2}, "DP2": {}}


def run_case(oracle: Oracle, build: Callable[[], TrainEngine], folder: Path) -> dict[str, float]:
    """Half the steps, the other half by an engine that loaded them; and how much the optimizer keeps."""
    half, engine = NUM_STEPS // 2, build()
    first = oracle.train(engine, range(half))
    engine.save(folder)
    engine = build()
    engine.load(folder)
    second = oracle.train(engine, range(half, NUM_STEPS))
    found = oracle.compare({name: first[name] + second[name] for name in first}, engine)
    moments = sum(tensor.numel() for kind, tensor in engine.tensors() if kind is Component.optimizer)
    return found | {"moments": moments / sum(p.numel() for p in oracle.weights.values())}


def deepspeed_cases(oracle: Oracle, optim: OptimConfig) -> dict[str, Callable[[], TrainEngine]]:
    from rlhf_mp.train.deepspeed_engine import DeepSpeedEngine

    def case(offload: OffloadConfig, stage: int) -> Callable[[], TrainEngine]:
        forward, own = settings("actor"), DeepSpeedConfig(zero_stage=stage, param_persistence_threshold=0)
        config = trained(offload, own, optim)
        load = lambda: oracle.build(forward.head, torch.float32)  # noqa: E731
        return lambda: DeepSpeedEngine(load, forward, config, NUM_STEPS, "float32")

    return {name: case(*knobs) for name, knobs in DEEPSPEED.items()}


def megatron_cases(oracle: Oracle, optim: OptimConfig) -> dict[str, Callable[[], TrainEngine]]:
    from megatron.core import parallel_state

    from rlhf_mp.train.megatron_engine import MegatronEngine

    own = ModelConfig(path=oracle.path, dtype="float32", enable_gradient_checkpointing=False)

    def case(layout: dict) -> Callable[[], TrainEngine]:
        def build() -> TrainEngine:
            parallel_state.destroy_model_parallel()
            config = trained(optim=optim, use_distributed_optimizer=False, **layout)
            return MegatronEngine(own, settings("actor"), config, NUM_STEPS)

        return build

    return {name: case(layout) for name, layout in MEGATRON.items()}


def main(backend: str, model: str, folder: str) -> None:
    """Writes ``folder/<backend>.json``: what was found of each case with momentum, and of the first without."""
    if backend == "megatron":
        from rlhf_mp.train import megatron_cpu

        megatron_cpu.install()
        from rlhf_mp.train.megatron_engine import init_distributed

        init_distributed(CPU)
    else:
        from rlhf_mp.train.deepspeed_engine import init_distributed

        init_distributed()
    report = {}
    for momentum in (0.9, 0.0):
        optim = OptimConfig(lr=0.05, optimizer="sgd", momentum=momentum, lr_warmup_steps=3)
        oracle = Oracle("actor", model, optim)
        report["smallest_move"] = oracle.smallest_move()
        cases = deepspeed_cases(oracle, optim) if backend == "deepspeed" else megatron_cases(oracle, optim)
        for name, build in [*cases.items()][: None if momentum else 1]:  # without it there is no state to go wrong
            where = Path(folder, backend, str(momentum), name)
            report[f"momentum {momentum:g}, {name}"] = worst(run_case(oracle, build, where))
    if dist.get_rank() == 0:
        Path(folder, f"{backend}.json").write_text(json.dumps(report))
    leave_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
