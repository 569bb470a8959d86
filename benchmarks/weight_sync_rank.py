"""One rank of ``benchmarks.weight_sync``: rank 0 starts the SGLang servers, all ranks push weights into them."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch._dynamo  # before DeepSpeed builds a model
import torch.distributed as dist
from torch import Tensor

from rlhf_mp.cluster.ranks import Ranks, leave_ranks
from rlhf_mp.config.schema import ActorConfig, RolloutConfig
from rlhf_mp.models.heads import PolicyHead
from rlhf_mp.models.hf import load_causal_lm
from rlhf_mp.rollout.sglang_client import EngineControl
from rlhf_mp.rollout.sglang_server import ServerPlan, SGLangServer
from rlhf_mp.train.accumulate import ForwardSettings
from rlhf_mp.train.base import TrainEngine
from rlhf_mp.train.deepspeed_engine import DeepSpeedEngine, init_distributed
from rlhf_mp.train.torch_engine import TorchEngine
from rlhf_mp.weights.base import Transport, WeightSync
from rlhf_mp.weights.buckets import Packer
from rlhf_mp.weights.disk import DiskTransport
from rlhf_mp.weights.distributed import DistributedTransport
from rlhf_mp.weights.encoding import encode
from rlhf_mp.weights.fleet import FixedRoster
from rlhf_mp.weights.tensor import TensorTransport

CPU = torch.device("cpu")
BUCKET_BYTES = 256 * 10**6
STARTUP_S, CALL_S = 400, 400
STAGES = ("gather_s", "wait_s", "verify_s")  # of the sending rank, one after the other


def main(case_text: str, out: str) -> None:
    case = json.loads(case_text)
    init_distributed()
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    settings = ForwardSettings(CPU, PolicyHead())
    trainer = make_trainer(case["model"], settings, ranks.num_ranks)
    with tempfile.TemporaryDirectory() as folder:
        servers = start_servers(case, Path(folder)) if ranks.rank == 0 else []
        try:
            result = measure(case, trainer, ranks, servers, Path(folder))
        finally:
            for server in servers:
                server.stop()
    if ranks.rank == 0:
        Path(out).write_text(json.dumps(result))
    leave_ranks()


def make_trainer(model: str, settings: ForwardSettings, num_ranks: int) -> TrainEngine:
    """One rank holds its weights whole; several share them by ZeRO-3 and gather them for every swap."""
    if num_ranks == 1:
        return TorchEngine(load_causal_lm(model, torch.float32), settings, ActorConfig(), 1)
    actor = ActorConfig()
    actor.deepspeed.zero_stage = 3
    return DeepSpeedEngine(lambda: load_causal_lm(model, torch.float32), settings, actor, 1, "float32")


def start_servers(case: dict[str, Any], folder: Path) -> list[SGLangServer]:
    rollout = RolloutConfig(
        dtype="float32", max_model_len=64, max_num_seqs=4, tensor_model_parallel_size=case["tensor_parallel"]
    )
    servers = [
        SGLangServer(
            ServerPlan(index=i, model_path=case["model"], on_cpu=True, gpus=(), seed=1),
            rollout,
            context=64,
            log_file=folder / f"engine{i}.log",
        )
        for i in range(case["engines"])
    ]
    for server in servers:
        server.wait_ready(STARTUP_S)
    return servers


def measure(
    case: dict[str, Any], trainer: TrainEngine, ranks: Ranks, servers: list[SGLangServer], folder: Path
) -> dict[str, Any]:
    controls = [EngineControl(server.name, server.address, CALL_S) for server in servers]
    workers = case["tensor_parallel"]
    transports: dict[str, Callable[[], Transport]] = {
        "tensor": lambda: TensorTransport(workers, ranks.gather, on_cpu=True),
        "distributed": lambda: DistributedTransport(workers, "127.0.0.1", on_cpu=True),
        "disk": lambda: DiskTransport(folder / "weights", ranks.rank == 0),
    }
    result: dict[str, Any] = {"transports": {}}
    for name in case["transports"]:
        transport = transports[name]()
        sync = WeightSync(
            transport,
            FixedRoster(controls),
            Packer(BUCKET_BYTES, CPU, shared=transport.shared_buffers),
            dtype=torch.float32,
            is_sender=ranks.rank == 0,
            workers_per_engine=workers,
        )
        swaps = [swap(sync, trainer, version, ranks) for version in range(case["rounds"] + 1)]
        result["transports"][name] = {key: median(s[key] for s in swaps[1:]) for key in swaps[0]}
    ranks.barrier()
    if ranks.rank == 0:
        num_bytes = result["transports"][case["transports"][0]]["bytes"]
        result["copy_gb_per_s"] = copy_rate(int(num_bytes))
    if case["per_parameter"]:
        result["per_parameter_s"] = one_call_per_parameter(trainer, controls, workers, ranks)
    return result


def swap(sync: WeightSync, trainer: TrainEngine, version: int, ranks: Ranks) -> dict[str, float]:
    """Seconds of one whole swap by stage, and its bytes."""
    ranks.barrier()
    start = time.perf_counter()
    metrics = sync.push(trainer.weights(), version, must_differ=False)
    seconds = time.perf_counter() - start
    if not metrics:
        return {"seconds": seconds}
    value = {name: metrics[f"sync/{name}"][0] for name in ("bytes", *STAGES, "engine_verify_s")}
    rest = seconds - sum(value[name] for name in STAGES)
    return {"seconds": seconds, **value, "other_s": rest, "gb_per_s": value["bytes"] / seconds / 1e9}


def copy_rate(num_bytes: int) -> float:
    """GB/s of one plain copy of as many bytes by all cores, in this state of the machine; the median of five."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # a swap keeps the trainer's and the engines' cores busy
    source, target = (torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return num_bytes / median(seconds) / 1e9


def one_call_per_parameter(
    trainer: TrainEngine, controls: list[EngineControl], workers: int, ranks: Ranks
) -> float | None:
    """Seconds of the naive way: gather, share and load one tensor at a time."""

    def load(control: EngineControl, name: str, tensor: Tensor) -> None:
        control.call(
            "/update_weights_from_tensor",
            serialized_named_tensors=[encode([(name, tensor)]) for _ in range(workers)],
            flush_cache=False,
        )

    ranks.barrier()
    start = time.perf_counter()
    for name, weight in trainer.weights():
        if ranks.rank == 0:
            shared = weight.detach().clone().share_memory_()
            for control in controls:
                load(control, name, shared)
    return time.perf_counter() - start if ranks.rank == 0 else None


if __name__ == "__main__":
    main(*sys.argv[1:])
