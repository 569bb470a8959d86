"""What every parity test trains, on what and with what loss; and TorchEngine's answers."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rlhf_mp.algorithms.value_loss import make_value_loss
from rlhf_mp.config.schema import ActorConfig, CriticConfig, DeepSpeedConfig, MegatronConfig, OffloadConfig, OptimConfig
from rlhf_mp.data.types import LossFn, PolicyOutput, TokenBatch, Totals
from rlhf_mp.models.heads import Head, PolicyHead, ValueHead
from rlhf_mp.models.hf import save_checkpoint
from rlhf_mp.train.accumulate import ForwardSettings
from rlhf_mp.train.base import TrainEngine
from rlhf_mp.train.torch_engine import TorchEngine

NUM_STEPS = 10
CPU = torch.device("cpu")
OPTIM = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.01, "lr_warmup_steps": 3, "lr_scheduler_type": "cosine"}
# A bias of keys hardly changes attention: its gradient is mostly rounding, which a small epsilon makes a full step.
OPTIM["eps"] = 1e-6
# Rows each data-parallel rank gets, cut unevenly: rank 1 of 2 has a micro-batch less and gets empty ones.
CUTS = {
    1: [[[0, 1, 2], [3], [4, 5]]],
    2: [[[0, 1], [2], [3]], [[4, 5], [], []]],
    4: [[[0], [1]], [[2], []], [[3], [4]], [[5], []]],
}


def trained(
    offload: OffloadConfig | None = None,
    deepspeed: DeepSpeedConfig | None = None,
    optim: OptimConfig | None = None,
    **megatron: Any,
) -> ActorConfig:
    megatron.setdefault("sequence_parallel", False)
    return ActorConfig(
        optim=optim or OptimConfig(**OPTIM),
        grad_clip=0.5,
        fsdp_config=offload or OffloadConfig(),
        deepspeed=deepspeed or DeepSpeedConfig(zero_stage=0),
        megatron=MegatronConfig(**megatron),
    )


def batch(step: int, vocab: int) -> TokenBatch:
    generator = torch.Generator().manual_seed(step)
    lengths = torch.tensor([5, 9, 3, 12, 7, 4])
    tokens = torch.randint(2, vocab, (6, 12), generator=generator)
    tokens[:, 3] = 2  # what some models call padding, as a token like any other
    columns = torch.arange(12)[None]
    mask = ((columns >= 2) & (columns < lengths[:, None])).float()
    advantages, values, returns = (torch.randn(6, 12, generator=generator) * mask for _ in range(3))
    return TokenBatch(
        tokens=tokens * (columns < lengths[:, None]),
        mask=mask,
        rewards=torch.zeros(6),
        group_ids=torch.arange(6),
        lengths=lengths,
        rollout_logprobs=torch.zeros(6, 12),
        advantages=advantages,
        values=values,
        returns=returns,
    )


def policy_gradient(output: PolicyOutput, batch: TokenBatch, totals: Totals):
    """With an entropy term: touches both outputs."""
    per_token = -(output.logprobs * batch.advantages) - 0.01 * output.entropy
    loss = (per_token * batch.mask).sum() / totals.num_tokens
    return loss, {"loss": (loss, torch.ones(()))}


HEADS: dict[str, tuple[Head, LossFn]] = {
    "actor": (PolicyHead(0.7, entropy_grad=True), policy_gradient),
    "critic": (ValueHead(), make_value_loss(CriticConfig(cliprange_value=0.8))),
}


CHUNK = {"logits_chunk_bytes": 5 * 4 * 64}
"""Few positions' logits at a time, where the oracle has all at once."""


def settings(role: str, *, packed: bool = False) -> ForwardSettings:
    """Of the engines that are compared with the oracle."""
    head = replace(HEADS[role][0], packed=packed)
    return ForwardSettings(CPU, replace(head, **CHUNK) if role == "actor" else head)


def make_critic_checkpoint(source: Path, folder: Path) -> None:
    """A critic that has been trained before: a head that is not new."""
    head = ValueHead()
    model = head.load(str(source), torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.score.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    save_checkpoint(model.named_parameters(), str(source), folder, torch.float32, head.saved_config)


def train(
    engine: TrainEngine, role: str, vocab: int, cut: list[list[int]], steps: Iterable[int] = range(NUM_STEPS)
) -> dict[str, list[float]]:
    losses, norms = [], []
    for step in steps:
        whole = batch(step, vocab)
        totals = Totals(int(whole.mask.sum()), 6)
        metrics = engine.train_step([whole.select(rows) for rows in cut], totals, HEADS[role][1])
        losses.append(metrics["loss"][0] if "loss" in metrics else 0.0)  # 0: of a rank whose sums do not count
        norms.append(metrics["grad_norm"][0])
    return {"loss": losses, "grad_norm": norms}


def summed_over_ranks(values: list[float]) -> torch.Tensor:
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total


def largest_difference(ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


class Oracle:
    """One model, trained by TorchEngine for NUM_STEPS."""

    def __init__(self, role: str, path: str, optim: OptimConfig | None = None):
        self.role, self.path = role, path
        head = HEADS[role][0]
        engine = TorchEngine(
            self.build(head, torch.float32), ForwardSettings(CPU, head), trained(optim=optim), NUM_STEPS
        )
        self.vocab = engine.module.config.vocab_size
        self.scored = [batch(0, self.vocab).select(rows) for rows in ([0, 3], [1], [2, 4, 5])]
        self.checkpoint = {name: p.detach().clone() for name, p in engine.weights()}
        self.first_score = engine.score(self.scored)
        self.trained = train(engine, role, self.vocab, CUTS[1][0])
        self.weights = {name: p.detach() for name, p in engine.weights()}
        self.score = engine.score(self.scored)

    def build(self, head: Head, dtype: torch.dtype) -> nn.Module:
        """What is trained, as it is before the first step."""
        return head.load(self.path, dtype)

    def smallest_move(self) -> float:
        """How far the weights of the stillest tensor went."""
        return min((self.weights[name] - start).abs().max().item() for name, start in self.checkpoint.items())

    def train(self, engine: TrainEngine, steps: Iterable[int] = range(NUM_STEPS)) -> dict[str, list[float]]:
        cut = CUTS[engine.layout.dp_size][engine.layout.dp_rank]
        return train(engine, self.role, self.vocab, cut, steps)

    def compare(self, found: dict[str, list[float]], engine: TrainEngine, first: int = 0) -> dict[str, float]:
        """Largest differences from step ``first`` on; of the gradient's norm, relative. Collective."""
        loss = summed_over_ranks(found["loss"]) - torch.tensor(self.trained["loss"][first:])
        norms = zip(found["grad_norm"], self.trained["grad_norm"][first:], strict=True)
        return {
            "loss": loss.abs().max().item(),
            "grad_norm": max(abs(a / b - 1) for a, b in norms),
            "weights": weight_difference(engine, self.weights),
        }


def weight_difference(engine: TrainEngine, expected: dict[str, torch.Tensor]) -> float:
    got = {name: tensor.detach().clone() for name, tensor in engine.weights()}
    if sorted(got) != sorted(expected):
        raise AssertionError(f"names differ: {sorted(set(got) ^ set(expected))}")
    return largest_difference([got[name] for name in expected], expected.values())


def worst(own: dict[str, float]) -> dict[str, float]:
    """Of all ranks."""
    ranks = [own] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return {key: max(rank[key] for rank in ranks) for key in own}
