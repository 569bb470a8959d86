"""One rank: every task without sampling on a real backend, each rank with its share, against one process with all."""

import json
import sys
from pathlib import Path

import torch
import torch._dynamo  # before DeepSpeed builds a model
import torch.distributed as dist

from rlhf_mp.algorithms.supervised import make_task
from rlhf_mp.cluster.ranks import leave_ranks
from rlhf_mp.config.load import config_from_dict
from rlhf_mp.data.batches import Batches
from rlhf_mp.data.collate import collate
from rlhf_mp.data.examples import ExampleReader
from rlhf_mp.data.order import PromptOrder
from rlhf_mp.data.partition import Cut
from rlhf_mp.models.hf import load_tokenizer, stop_token_ids
from rlhf_mp.train.base import ParallelLayout, TrainEngine
from rlhf_mp.train.build import join_ranks, make_actor, make_reference

CPU = torch.device("cpu")
NUM_STEPS, BATCH = 6, 8
ONE_PROCESS = ParallelLayout(dp_rank=0, dp_size=1, is_output_rank=True)


def config_of(task: str, folder: Path, overrides: list[str]):
    tree = {
        "trainer": {"task": task, "n_gpus_per_node": 2},
        "data": {"train_batch_size": BATCH, "max_length": 16, "apply_chat_template": False},
        "actor_rollout_ref": {
            "model": {"path": str(folder / "model"), "dtype": "float32"},
            "actor": {"optim": {"lr": 1e-3, "eps": 1e-6}, "grad_clip": 0.5},
        },
    }
    return config_from_dict(tree, overrides)


def train(engine: TrainEngine, config, examples, cut: Cut, layout: ParallelLayout) -> dict[str, list[float]]:
    """Loss and gradient norm of every step; the loss summed over ranks."""
    task, batches = make_task(config), None
    reference = make_reference(config, CPU, engine) if task.needs_reference else None
    batches = Batches(examples, PromptOrder(len(examples), BATCH, 1, True), (cut, cut), layout.dp_rank, layout.dp_size)
    found: dict[str, list[float]] = {"loss": [], "grad_norm": [], "accuracy": []}
    for _ in range(NUM_STEPS):
        share = batches.fetch()
        batch = collate(share.trajectories)
        if reference is not None:
            from rlhf_mp.trainer.loop import scored

            batch.ref_logprobs = scored(reference, batch, share.score_rows)
        (minibatch,) = share.minibatches
        micro_batches = [batch.select(rows) for rows in minibatch.micro_batches]
        metrics = engine.train_step(micro_batches, minibatch.totals, task.loss)
        found["loss"].append(metrics.get("loss", (0.0, 0))[0])
        found["accuracy"].append(metrics.get("accuracy", (0.0, 0))[0])
        found["grad_norm"].append(metrics["grad_norm"][0])
    return found


def over_ranks(values: list[float]) -> torch.Tensor:
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total


def compare(task: str, folder: Path, backend: list[str]) -> dict[str, float]:
    """Largest differences from the oracle."""
    config = config_of(task, folder, backend)
    alone = config_of(task, folder, ["actor_rollout_ref.actor.strategy=torch", "trainer.n_gpus_per_node=1"])
    tokenizer = load_tokenizer(str(folder / "model"))
    reader = ExampleReader(task, tokenizer, stop_token_ids(str(folder / "model"), tokenizer), config.data)
    examples = reader.read([str(folder / "rows.jsonl")]).examples
    oracle, engine = make_actor(alone, CPU, NUM_STEPS), make_actor(config, CPU, NUM_STEPS)
    expected = train(oracle, alone, examples, Cut(max_tokens=200), ONE_PROCESS)
    found = train(engine, config, examples, Cut(max_tokens=40), engine.layout)
    weights = {name: p.detach().clone() for name, p in oracle.weights()}
    differences = {name: (p - weights.pop(name)).abs().max().item() for name, p in engine.weights()}
    assert not weights, f"not exported: {sorted(weights)}"
    batch = collate([t for group, example in enumerate(examples[:6]) for t in example.trajectories(group)])
    scores = zip(*(model.score([batch.select([0, 1, 4, 5]), batch]) for model in (engine, oracle)), strict=True)
    norms = zip(found["grad_norm"], expected["grad_norm"], strict=True)
    return {
        "loss": (over_ranks(found["loss"]) - torch.tensor(expected["loss"])).abs().max().item(),
        "accuracy": (over_ranks(found["accuracy"]) - torch.tensor(expected["accuracy"])).abs().max().item(),
        "grad_norm": max(abs(a / b - 1) for a, b in norms),
        "weights": max(differences.values()),
        "score": max((ours - theirs).abs().max().item() for ours, theirs in scores),
        "fell": expected["loss"][0] - expected["loss"][-1],
    }


def main(folder: Path, backend: list[str]) -> None:
    join_ranks(config_of("sft", folder, backend), CPU)
    found = {task: compare(task, folder, backend) for task in ("sft", "dpo", "reward_model")}
    if dist.get_rank() == 0:
        (folder / "report.json").write_text(json.dumps(found))
    leave_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
