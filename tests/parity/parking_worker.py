"""One rank of the test of parking: each backend trains twice, once with all it can do without out between its steps."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from megatron_worker import LAYOUTS, engine_of
from oracle import CPU, NUM_STEPS, Oracle, settings
from zero_worker import builder, case

from rlhf_mp.cluster.ranks import leave_ranks
from rlhf_mp.planner.term import SENT
from rlhf_mp.train.base import TrainEngine
from rlhf_mp.train.deepspeed_engine import DeepSpeedEngine, init_distributed
from rlhf_mp.train.parking import Parking

STAGES = [(0, False, False), (1, False, False), (2, False, True), (3, False, False), (3, True, True)]
MEGATRON = ["TP2 SP", "PP2 VPP2", "DP2", "DP2 plain optimizer", "DP2, optimizer on the host"]


@contextmanager
def zero(oracle: Oracle, knobs: tuple[int, bool, bool]) -> Iterator[DeepSpeedEngine]:
    engine = DeepSpeedEngine(builder(oracle), settings(oracle.role), case(*knobs), NUM_STEPS, "float32")
    yield engine
    engine.engine.destroy()


@contextmanager
def megatron(oracle: Oracle, name: str) -> Iterator[TrainEngine]:
    with engine_of(oracle, LAYOUTS[2][name]) as (engine, *_):
        yield engine


def held(engine: TrainEngine) -> dict[str, int]:
    """Bytes of the weights, and of everything else."""
    parts = [(component in SENT, tensor.untyped_storage()) for component, tensor in engine.tensors()]
    sent = {storage._cdata: storage.nbytes() for is_sent, storage in parts if is_sent}
    others = {storage._cdata: storage.nbytes() for _, storage in parts if storage._cdata not in sent}
    return {"weights": sum(sent.values()), "others": sum(others.values())}


def trained(engine: TrainEngine, oracle: Oracle, parking: Parking) -> dict:
    found, seen, weights = [], [], {}
    for step in range(NUM_STEPS):
        found.append(oracle.train(engine, [step]))
        before, metrics, during = held(engine), parking.out(), held(engine)
        weights = {name: weight.detach().clone() for name, weight in engine.weights()}  # as a swap reads them
        scores = engine.score(oracle.scored)  # as the canary needs them
        metrics |= parking.back()
        seen.append({"before": before, "during": during, "after": held(engine), "metrics": metrics})
    return {"found": found, "seen": seen, "weights": [*weights.values(), *scores]}


def compared(oracle: Oracle, made: Callable[[], AbstractContextManager[TrainEngine]]) -> dict:
    with made() as engine:
        plain = trained(engine, oracle, Parking())
    with made() as engine:
        parked = trained(engine, oracle, Parking([engine], CPU, dist.barrier))
    equal = [torch.equal(a, b) for a, b in zip(plain["weights"], parked["weights"], strict=True)]
    return {"steps": plain["found"] == parked["found"], "weights": all(equal), "seen": parked["seen"]}


def main(out: str, path: str) -> None:
    """Writes for each case whether the two were the same bit for bit, and what was held when."""
    init_distributed()
    oracle = Oracle("actor", path)
    cases = {f"stage {knobs}": lambda knobs=knobs: zero(oracle, knobs) for knobs in STAGES}
    cases |= {name: lambda name=name: megatron(oracle, name) for name in MEGATRON}
    found = {name: compared(oracle, made) for name, made in cases.items()}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    leave_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
