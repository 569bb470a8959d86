"""One rank of the parity test: Megatron in several layouts against TorchEngine on the same batches, in one launch."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from rlhf_mp.config.schema import ActorConfig, MegatronConfig, ModelConfig, OptimConfig
from rlhf_mp.data.types import TokenBatch, Totals
from rlhf_mp.models.heads import PolicyHead
from rlhf_mp.models.hf import load_causal_lm
from rlhf_mp.train import megatron_cpu
from rlhf_mp.train.accumulate import ForwardSettings
from rlhf_mp.train.torch_engine import TorchEngine

megatron_cpu.install()

from megatron.core import parallel_state  # noqa: E402

from rlhf_mp.train.megatron_engine import MegatronEngine, MegatronScorer, init_distributed  # noqa: E402

NUM_STEPS = 10
CPU = torch.device("cpu")
ORACLE = ForwardSettings(CPU, PolicyHead(0.7, entropy_grad=True))
# Five positions' logits at a time (of a vocabulary padded to 128), where the oracle has all at once.
SETTINGS = ForwardSettings(CPU, PolicyHead(0.7, entropy_grad=True, logits_chunk_bytes=5 * 4 * 128))
OPTIM = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.01, "lr_warmup_steps": 3, "lr_scheduler_type": "cosine"}
# A bias of keys hardly changes attention: its gradient is mostly rounding, which a small epsilon makes a full step.
OPTIM["eps"] = 1e-6
# Rows each data-parallel rank gets, cut unevenly: rank 1 of 2 has a micro-batch less and gets empty ones.
CUTS = {1: [[[0, 1, 2], [3], [4, 5]]], 2: [[[0, 1], [2], [3]], [[4, 5], [], []]]}


def actor(**megatron) -> ActorConfig:
    megatron.setdefault("sequence_parallel", False)
    return ActorConfig(
        optim=OptimConfig(**OPTIM),
        grad_clip=0.5,
        megatron=MegatronConfig(**megatron),
    )


def batch(step: int, vocab: int) -> TokenBatch:
    generator = torch.Generator().manual_seed(step)
    lengths = torch.tensor([5, 9, 3, 12, 7, 4])
    tokens = torch.randint(2, vocab, (6, 12), generator=generator)
    tokens[:, 3] = 2  # what the model calls padding, as a token like any other
    columns = torch.arange(12)[None]
    mask = ((columns >= 2) & (columns < lengths[:, None])).float()
    return TokenBatch(
        tokens=tokens * (columns < lengths[:, None]),
        mask=mask,
        rewards=torch.zeros(6),
        group_ids=torch.arange(6),
        lengths=lengths,
        rollout_logprobs=torch.zeros(6, 12),
        advantages=torch.randn(6, 12, generator=generator) * mask,
    )


def loss_fn(output, batch: TokenBatch, totals: Totals):
    """Policy gradient with an entropy term: touches both outputs."""
    per_token = -(output.logprobs * batch.advantages) - 0.01 * output.entropy
    loss = (per_token * batch.mask).sum() / totals.num_tokens
    return loss, {"loss": (loss, torch.ones(()))}


def train(engine, cut: list[list[int]], vocab: int, steps=range(NUM_STEPS)) -> dict[str, list[float]]:
    losses, norms = [], []
    for step in steps:
        whole = batch(step, vocab)
        totals = Totals(int(whole.mask.sum()), 6)
        metrics = engine.train_step([whole.select(rows) for rows in cut], totals, loss_fn)
        losses.append(metrics["loss"][0] if "loss" in metrics else 0.0)
        norms.append(metrics["grad_norm"][0])
    return {"loss": losses, "grad_norm": norms}


def summed_over_ranks(values: list[float]) -> torch.Tensor:
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total


LAYOUTS = {
    1: {
        "one rank": {},
        "plain optimizer": {"use_distributed_optimizer": False},
        "recompute full": {"recompute": "full"},
        "recompute selective": {"recompute": "selective"},
        "packed": {"packed": True},
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
    },
    4: {
        "TP2 PP2 SP": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True},
        "TP2 DP2": {"tensor_model_parallel_size": 2},
    },
}
RESUMED = {
    1: [("one rank", "one rank")],
    2: [("TP2 SP", "PP2"), ("PP2 VPP2", "DP2"), ("DP2", "TP2"), ("DP2", "DP2")],
    4: [("TP2 PP2 SP", "TP2 DP2")],
}
"""Saved in the first layout, resumed in the second."""


class Oracle:
    """TorchEngine's answers."""

    def __init__(self, path: str):
        engine = TorchEngine(load_causal_lm(path, torch.float32), ORACLE, actor(), NUM_STEPS)
        self.vocab = engine.module.config.vocab_size
        self.scored = [batch(0, self.vocab).select(rows) for rows in ([0, 3], [1], [2, 4, 5])]
        self.checkpoint = {name: p.detach().clone() for name, p in engine.weights()}
        self.first_score = engine.score(self.scored)
        self.trained = train(engine, CUTS[1][0], self.vocab)
        self.weights = {name: p.detach() for name, p in engine.weights()}
        self.score = engine.score(self.scored)

    def smallest_move(self) -> float:
        """How far the weights of the stillest tensor went."""
        return min((self.weights[name] - start).abs().max().item() for name, start in self.checkpoint.items())

    def compare(self, trained: dict[str, list[float]], engine: MegatronEngine, first: int = 0) -> dict[str, float]:
        """Largest differences from step ``first`` on. Collective."""
        loss = summed_over_ranks(trained["loss"]) - torch.tensor(self.trained["loss"][first:])
        norms = zip(trained["grad_norm"], self.trained["grad_norm"][first:], strict=True)
        return {
            "loss": loss.abs().max().item(),
            "grad_norm": max(abs(a - b) for a, b in norms),
            "weights": weight_difference(engine, self.weights),
        }


def largest_difference(ours, theirs) -> float:
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def weight_difference(engine: MegatronEngine, expected: dict[str, torch.Tensor]) -> float:
    got = {name: tensor.clone() for name, tensor in engine.weights()}
    if sorted(got) != sorted(expected):
        raise AssertionError(f"names differ: {sorted(set(got) ^ set(expected))}")
    return largest_difference([got[name] for name in expected], expected.values())


@contextmanager
def engine_of(path: str, knobs: dict) -> Iterator[tuple[MegatronEngine, ModelConfig, ActorConfig]]:
    knobs = dict(knobs)
    settings = replace(SETTINGS, head=replace(SETTINGS.head, packed=knobs.pop("packed", False)))
    config = actor(**knobs)
    model = ModelConfig(path=path, dtype="float32", enable_gradient_checkpointing="recompute" in knobs)
    yield MegatronEngine(model, settings, config, NUM_STEPS), model, config
    parallel_state.destroy_model_parallel()


def own_cut(engine: MegatronEngine) -> list[list[int]]:
    return CUTS[engine.layout.dp_size][engine.layout.dp_rank]


def run_layout(path: str, oracle: Oracle, knobs: dict) -> dict[str, float]:
    with engine_of(path, knobs) as (engine, model, config):
        exported = weight_difference(engine, oracle.checkpoint)
        trained = train(engine, own_cut(engine), oracle.vocab)
        reference = MegatronScorer(model, engine.pipeline.settings, config.megatron)
        return oracle.compare(trained, engine) | {
            "export": exported,
            "score": largest_difference(engine.score(oracle.scored), oracle.score),
            "reference": largest_difference(reference.score(oracle.scored), oracle.first_score),
        }


def run_resumed(path: str, oracle: Oracle, first: dict, second: dict, folder: Path) -> dict[str, float]:
    with engine_of(path, first) as (engine, *_):
        train(engine, own_cut(engine), oracle.vocab, range(NUM_STEPS // 2))
        engine.save(folder)
    with engine_of(path, second) as (engine, *_):
        engine.load(folder)
        trained = train(engine, own_cut(engine), oracle.vocab, range(NUM_STEPS // 2, NUM_STEPS))
        return oracle.compare(trained, engine, NUM_STEPS // 2)


def worst(own: dict[str, float]) -> dict[str, float]:
    """Of all ranks."""
    ranks = [own] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return {key: max(rank[key] for rank in ranks) for key in own}


def main(folder: str) -> None:
    """Reads ``folder/model`` and writes ``folder/report.json``."""
    init_distributed(CPU)
    world, path = dist.get_world_size(), f"{folder}/model"
    oracle, layouts = Oracle(path), LAYOUTS[world]
    report = {
        "layouts": {name: worst(run_layout(path, oracle, knobs)) for name, knobs in layouts.items()},
        "resumed": {
            f"{a} -> {b}": worst(run_resumed(path, oracle, layouts[a], layouts[b], Path(folder, f"{a} to {b}")))
            for a, b in RESUMED[world]
        },
        "first_loss": oracle.trained["loss"][0],
        "smallest_move": oracle.smallest_move(),
    }
    if dist.get_rank() == 0:
        Path(folder, "report.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
