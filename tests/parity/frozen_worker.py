"""One rank that scores with a reward model in 4 and 8 bits: under ZeRO-3, in host memory or not, and in one process."""

import json
import sys
from pathlib import Path

import torch
import torch._dynamo  # before DeepSpeed builds a model
import torch.distributed as dist

from rlhf_mp.cluster.ranks import leave_ranks
from rlhf_mp.config.load import config_from_dict
from rlhf_mp.data.collate import collate
from rlhf_mp.data.types import TokenBatch, Trajectory
from rlhf_mp.planner.term import Component
from rlhf_mp.train.base import Scorer
from rlhf_mp.train.build import make_reward_scorer
from rlhf_mp.train.deepspeed_engine import init_distributed

CPU = torch.device("cpu")


def scorer(path: str, strategy: str, *, quantization: str | None, offload: bool = False) -> Scorer:
    tree = {
        "data": {"train_files": "t"},
        "trainer": {"n_gpus_per_node": 1 if strategy == "torch" else dist.get_world_size(), "device": "cpu"},
        "actor_rollout_ref": {"model": {"path": "m", "dtype": "float32"}, "actor": {"strategy": strategy}},
        "reward_model": {
            "enable": True,
            "model": {"path": path, "dtype": "float32", "quantization": quantization},
            "fsdp_config": {"param_offload": offload},
        },
    }
    return make_reward_scorer(config_from_dict(tree), CPU)


def batches(rank: int) -> list[TokenBatch]:
    """Each rank's own, equally many."""
    generator = torch.Generator().manual_seed(rank)
    rows = [torch.randint(2, 14, (length,), generator=generator).tolist() for length in (5, 30, 17, 2)]
    made = [Trajectory(r[:1], r[1:], [0.0] * len(r[1:]), [True] * len(r[1:]), 0, 0, 0, "stop") for r in rows]
    return [collate(made[:3]), collate(made[3:])]


def measured(path: str, kind: str, given: list[TokenBatch], whole: torch.Tensor) -> dict[str, float]:
    alone = torch.cat(scorer(path, "torch", quantization=kind).score(given))
    found = {"spread": (whole.max() - whole.min()).item(), "moved": (alone - whole).abs().max().item()}
    for offload in (False, True):
        spread = scorer(path, "deepspeed", quantization=kind, offload=offload)
        found[f"offload {offload}"] = (torch.cat(spread.score(given)) - alone).abs().max().item()
        found["bytes"] = sum(t.nbytes for component, t in spread.tensors() if component is Component.weights)
        spread.engine.destroy()
    return found


def main(out: str, path: str) -> None:
    init_distributed()
    given = batches(dist.get_rank())
    whole = torch.cat(scorer(path, "torch", quantization=None).score(given))
    found = {kind: measured(path, kind, given, whole) for kind in ("nf4", "int8")}
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(gathered))
    leave_ranks()


main(*sys.argv[1:])
