"""One rank of the parity test: Megatron in several layouts against TorchEngine on the same batches, in one launch."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from oracle import CPU, NUM_STEPS, Oracle, largest_difference, settings, trained, weight_difference, worst

from rlhf_mp.cluster.ranks import leave_ranks
from rlhf_mp.config.schema import ActorConfig, ModelConfig, OffloadConfig
from rlhf_mp.train import megatron_cpu

megatron_cpu.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.pipeline_parallel import p2p_communication  # noqa: E402

from rlhf_mp.train.megatron_engine import MegatronEngine, MegatronScorer, init_distributed  # noqa: E402

ON_HOST = {"offload": OffloadConfig(optimizer_offload=True)}
LAYOUTS = {
    1: {
        "one rank": {},
        "plain optimizer": {"use_distributed_optimizer": False},
        "recompute full": {"recompute": "full"},
        "recompute selective": {"recompute": "selective"},
        "packed": {"packed": True},
        "optimizer on the host": ON_HOST,
    },
    2: {
        "TP2": {"tensor_model_parallel_size": 2},
        "TP2 SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        "TP2 SP packed": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "packed": True},
        "PP2": {"pipeline_model_parallel_size": 2},
        "PP2 VPP2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        "PP2 packed, recompute full": {"pipeline_model_parallel_size": 2, "packed": True, "recompute": "full"},
        "DP2": {},
        "DP2 plain optimizer": {"use_distributed_optimizer": False},
        "CP2": {"context_parallel_size": 2},
        "TP2, optimizer on the host": {"tensor_model_parallel_size": 2} | ON_HOST,
        "DP2, optimizer on the host": ON_HOST,
    },
    4: {
        "TP2 PP2 SP": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True},
        "TP2 DP2": {"tensor_model_parallel_size": 2},
    },
}
RESUMED = {
    1: [("one rank", "one rank")],
    2: [
        ("TP2 SP", "PP2"),
        ("PP2 VPP2", "DP2"),
        ("DP2", "TP2"),
        ("DP2", "DP2"),
        ("TP2, optimizer on the host", "DP2, optimizer on the host"),
        ("DP2, optimizer on the host", "PP2"),
    ],
    4: [("TP2 PP2 SP", "TP2 DP2")],
}
"""Saved in the first layout, resumed in the second."""


class Sent:
    """A send between stages, which notes whether what it sends was freed before anybody waited for it."""

    freed = 0  # so far, on this rank

    def __init__(self, request: dist.Work, tensor: torch.Tensor):
        self.request, self.storage = request, tensor.untyped_storage()._weak_ref()

    def wait(self) -> None:
        Sent.freed += torch.UntypedStorage._expired(self.storage)
        self.request.wait()


def watched(exchange: Callable) -> Callable:
    def exchange_and_watch(**how) -> dict:
        requests = exchange(**how)
        return requests | {name: Sent(requests[name], how[f"tensor_{name}"]) for name in requests if "send" in name}

    return exchange_and_watch


p2p_communication._p2p_ops = watched(p2p_communication._p2p_ops)


@contextmanager
def engine_of(oracle: Oracle, knobs: dict) -> Iterator[tuple[MegatronEngine, ModelConfig, ActorConfig]]:
    knobs = dict(knobs)
    forward = settings(oracle.role, packed=knobs.pop("packed", False))
    config = trained(**knobs)
    model = ModelConfig(path=oracle.path, dtype="float32", enable_gradient_checkpointing="recompute" in knobs)
    yield MegatronEngine(model, forward, config, NUM_STEPS), model, config
    parallel_state.destroy_model_parallel()


def run_layout(oracle: Oracle, knobs: dict) -> dict[str, float]:
    Sent.freed = 0
    with engine_of(oracle, knobs) as (engine, model, config):
        exported = weight_difference(engine, oracle.checkpoint)
        found = oracle.train(engine)
        frozen = MegatronScorer(model, engine.pipeline.settings, config.megatron)
        return oracle.compare(found, engine) | {
            "export": exported,
            "freed_in_flight": Sent.freed,
            "score": largest_difference(engine.score(oracle.scored), oracle.score),
            "frozen": largest_difference(frozen.score(oracle.scored), oracle.first_score),
        }


def run_resumed(oracle: Oracle, first: dict, second: dict, folder: Path) -> dict[str, float]:
    with engine_of(oracle, first) as (engine, *_):
        oracle.train(engine, range(NUM_STEPS // 2))
        engine.save(folder)
    with engine_of(oracle, second) as (engine, *_):
        engine.load(folder)
        return oracle.compare(oracle.train(engine, range(NUM_STEPS // 2, NUM_STEPS)), engine, NUM_STEPS // 2)


def report_of(oracle: Oracle, folder: Path) -> dict:
    layouts, resumed = LAYOUTS[dist.get_world_size()], RESUMED[dist.get_world_size()]
    return {
        "layouts": {name: worst(run_layout(oracle, knobs)) for name, knobs in layouts.items()},
        "resumed": {
            f"{a} -> {b}": worst(run_resumed(oracle, layouts[a], layouts[b], folder / f"{a} to {b}"))
            for a, b in resumed
        },
        "first_loss": oracle.trained["loss"][0],
        "smallest_move": oracle.smallest_move(),
    }


def main(folder: str, *roles: str) -> None:
    """Reads ``folder/<role>`` of each role and writes ``folder/report.json``."""
    init_distributed(CPU)
    report = {role: report_of(Oracle(role, f"{folder}/{role}"), Path(folder, "saved", role)) for role in roles}
    if dist.get_rank() == 0:
        Path(folder, "report.json").write_text(json.dumps(report))
    leave_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
