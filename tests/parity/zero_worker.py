"""One rank of the parity test: every ZeRO stage and offload against TorchEngine on the same batches, in one launch."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch._dynamo  # before DeepSpeed builds a model
import torch.distributed as dist

from rlhf_mp.config.schema import ActorConfig, DeepSpeedConfig, OffloadConfig, OptimConfig
from rlhf_mp.data.types import TokenBatch, Totals
from rlhf_mp.models.heads import PolicyHead
from rlhf_mp.models.hf import load_causal_lm
from rlhf_mp.train.accumulate import ForwardSettings
from rlhf_mp.train.deepspeed_engine import DeepSpeedEngine, DeepSpeedScorer, init_distributed
from rlhf_mp.train.torch_engine import TorchEngine

NUM_STEPS = 10
ORACLE = ForwardSettings(torch.device("cpu"), PolicyHead(0.7, entropy_grad=True))
# Five positions' logits at a time (of a vocabulary of 32), where the oracle has all at once.
SETTINGS = ForwardSettings(torch.device("cpu"), PolicyHead(0.7, entropy_grad=True, logits_chunk_bytes=5 * 4 * 32))
LAST_CASES = [(3, True, True, False), (3, True, True, True)]  # the last one packed and with activations on the host
# Rows each of one or two ranks gets, cut unevenly: rank 1 has a micro-batch less and gets an empty one.
CUTS = {1: [[[0, 1, 2], [3], [4, 5]]], 2: [[[0, 1], [2], [3]], [[4, 5], [], []]]}


def actor(stage: int, param_offload: bool, optimizer_offload: bool) -> ActorConfig:
    return ActorConfig(
        optim=OptimConfig(lr=1e-3, betas=[0.9, 0.95], weight_decay=0.01, lr_warmup_steps=3, lr_scheduler_type="cosine"),
        grad_clip=0.5,
        fsdp_config=OffloadConfig(param_offload=param_offload, optimizer_offload=optimizer_offload),
        deepspeed=DeepSpeedConfig(zero_stage=stage, param_persistence_threshold=0),
    )


def batch(step: int, vocab: int) -> TokenBatch:
    generator = torch.Generator().manual_seed(step)
    lengths = torch.tensor([5, 9, 3, 12, 7, 4])
    tokens = torch.randint(2, vocab, (6, 12), generator=generator)
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


def train(engine, cut: list[list[int]], vocab: int) -> dict[str, list[float]]:
    losses, norms = [], []
    for step in range(NUM_STEPS):
        whole = batch(step, vocab)
        totals = Totals(int(whole.mask.sum()), 6)
        metrics = engine.train_step([whole.select(rows) for rows in cut], totals, loss_fn)
        losses.append(metrics["loss"][0])
        norms.append(metrics["grad_norm"][0])
    return {"loss": losses, "grad_norm": norms}


def summed_over_ranks(values: list[float]) -> torch.Tensor:
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total


def in_bfloat16(build, world: int, rank: int, vocab: int) -> dict[str, list[float]]:
    """ZeRO-3 with both offloads, as large models are trained."""
    half = lambda: build().bfloat16()  # noqa: E731
    engine = DeepSpeedEngine(half, SETTINGS, actor(3, True, True), NUM_STEPS, "bfloat16")
    got = train(engine, CUTS[world][rank], vocab)
    return {"loss": summed_over_ranks(got["loss"]).tolist(), "grad_norm": got["grad_norm"]}


def main(model_path: str, out: str) -> None:
    init_distributed()
    rank, world = dist.get_rank(), dist.get_world_size()
    build = lambda: load_causal_lm(model_path, torch.float32)  # noqa: E731
    vocab = build().config.vocab_size
    oracle = TorchEngine(build(), ORACLE, actor(0, False, False), NUM_STEPS)
    expected = train(oracle, CUTS[1][0], vocab)
    weights = {name: p.detach().clone() for name, p in oracle.weights()}
    scored = batch(0, vocab)
    expected_score = oracle.score([scored])[0]

    results = {}
    cases = [(stage, False, offload) for stage in range(4) for offload in (False, True) if stage or not offload]
    for stage, param_offload, optimizer_offload, packed in [*((*case, False) for case in cases), *LAST_CASES]:
        settings, make = SETTINGS, build
        if packed:
            settings = replace(SETTINGS, head=replace(SETTINGS.head, packed=True), offload_layers=1)
            make = lambda: settings.head.load(model_path, torch.float32)  # noqa: E731, B023
        engine = DeepSpeedEngine(make, settings, actor(stage, param_offload, optimizer_offload), NUM_STEPS, "float32")
        got = train(engine, CUTS[world][rank], vocab)
        name = f"stage {stage}, param_offload {param_offload}, optimizer_offload {optimizer_offload}"
        name += ", packed, activations on the host" * packed
        exported = {n: (p - weights[n]).abs().max().item() for n, p in engine.weights()}
        results[name] = {
            "loss": (summed_over_ranks(got["loss"]) - torch.tensor(expected["loss"])).abs().max().item(),
            "grad_norm": max(abs(a / b - 1) for a, b in zip(got["grad_norm"], expected["grad_norm"], strict=True)),
            "weights": max(exported.values()),
            "score": (engine.score([scored])[0] - expected_score).abs().max().item(),
            "names": sorted(exported) == sorted(weights),
        }
        engine.engine.destroy()
    reference = DeepSpeedScorer(build, SETTINGS, actor(3, False, False), OffloadConfig(param_offload=True), "float32")
    untrained = TorchEngine(build(), ORACLE, actor(0, False, False), NUM_STEPS).score([scored])[0]
    results["reference"] = {"score": (reference.score([scored])[0] - untrained).abs().max().item()}
    moved = max((p - dict(build().named_parameters())[name]).abs().max().item() for name, p in weights.items())
    found = {
        "cases": results,
        "loss": expected["loss"],
        "moved": moved,
        "bfloat16": in_bfloat16(build, world, rank, vocab),
    }
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
