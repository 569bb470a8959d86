"""For how long a checkpoint holds training up: written while it waits, and while it goes on. In turns, in one run.

  python -m benchmarks.saves --strategy deepspeed --rounds 5

One rank. Steps follow each other as fast as they can; every few steps is a save.
"""

import argparse
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.record import add_results_option, provenance, write_results
from rlhf_mp import checkpoint
from rlhf_mp.algorithms.supervised import fine_tuning_loss
from rlhf_mp.cluster.launcher import rank_environment
from rlhf_mp.cluster.ranks import Ranks, leave_ranks
from rlhf_mp.config.load import config_from_dict
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.data.types import TokenBatch, Totals
from rlhf_mp.models.tiny import TinyShape, character_tokenizer, make_checkpoint
from rlhf_mp.train.base import TrainEngine
from rlhf_mp.train.build import join_ranks, make_actor
from rlhf_mp.trainer.checkpoints import RunCheckpoints

STEPS_BETWEEN = 6


@dataclass
class Saver:
    """What a save needs of a trainer, and a clock."""

    engine: TrainEngine
    checkpoints: RunCheckpoints
    step: int = 0
    best: None = None
    waits: list[float] = field(default_factory=list)

    @property
    def trained(self) -> dict[str, TrainEngine]:
        return {"actor": self.engine}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def train(self) -> float:
        """Save, and go on for a few steps. Seconds that one of them takes, checkpoint or not."""
        began = perf_counter()
        self.checkpoints.save(self)
        self.waits.append(perf_counter() - began)
        tokens = torch.randint(2, 12, (8, 64), generator=torch.Generator().manual_seed(self.step))
        ones = torch.ones(8, 64)
        batch = TokenBatch(tokens, ones, ones[:, 0], torch.arange(8), torch.full((8,), 64), ones * 0)
        began = perf_counter()
        for _ in range(STEPS_BETWEEN):
            self.engine.train_step([batch], Totals(512, 8), fine_tuning_loss("token-mean"))
            self.step += 1
            self.checkpoints.settle(wait=False)
        return (perf_counter() - began) / STEPS_BETWEEN


def config_of(model: str, strategy: str) -> RunConfig:
    offload = strategy == "deepspeed"
    fsdp = {"param_offload": offload, "optimizer_offload": offload}
    actor = {"strategy": strategy, "fsdp_config": fsdp}
    policy = {"model": {"path": model, "dtype": "float32", "enable_gradient_checkpointing": False}, "actor": actor}
    data = {"train_files": "none.jsonl", "response_key": "answer"}
    return config_from_dict(
        {"trainer": {"task": "sft", "n_gpus_per_node": 1}, "data": data, "actor_rollout_ref": policy}
    )


def measure(engine: TrainEngine, folder: Path, rounds: int) -> dict[str, Any]:
    """Both ways by turns, after one round of each that does not count."""
    savers = {
        name: Saver(
            engine,
            RunCheckpoints(
                folder / name, Ranks(0, 1), keep=1, resume_from=None, resume=False, identity={}, trained={},
                export=None, say=lambda text: None, in_background=name == "background",
            ),
        )
        for name in ("waiting", "background")
    }  # fmt: skip
    steps: dict[str, list[float]] = {name: [] for name in savers}
    for _ in range(rounds + 1):
        for name, saver in savers.items():
            saver.step = max(other.step for other in savers.values()) + 1
            steps[name].append(saver.train())
            saver.checkpoints.settle(wait=True)
    found = {f"{name}_blocking_s": statistics.median(saver.waits[1:]) for name, saver in savers.items()}
    found |= {f"{name}_step_s": statistics.median(times[1:]) for name, times in steps.items()}
    (newest, *_) = checkpoint.newest_first(folder / "background")
    found["gigabytes"] = sum(f.stat().st_size for f in newest.rglob("*") if f.is_file()) / 1e9
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=("torch", "deepspeed", "megatron"), default="deepspeed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=512, help="of the model, 8 layers")
    add_results_option(parser)
    args = parser.parse_args(argv)
    measured_on = provenance()
    os.environ["DS_ACCELERATOR"] = "cpu"
    rank_environment()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        shape = TinyShape(hidden=args.hidden, layers=8)
        make_checkpoint(model, character_tokenizer("0123456789+= "), shape)
        config = config_of(str(model), args.strategy)
        join_ranks(config, torch.device("cpu"))
        found = measure(make_actor(config, torch.device("cpu"), 1000), Path(folder), args.rounds)
    for name, value in found.items():
        print(f"{name:24} {value:8.3f}")
    write_results(args.json, {"provenance": measured_on, "strategy": args.strategy, **found})
    leave_ranks()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
