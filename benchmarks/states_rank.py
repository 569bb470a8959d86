"""One rank of ``benchmarks.states``: builds every ZeRO stage and offload, steps once, sums its tensors by component."""

import json
import sys
from pathlib import Path

import torch
import torch._dynamo  # before DeepSpeed builds a model
import torch.distributed as dist

from rlhf_mp.config.schema import ActorConfig, DeepSpeedConfig, OffloadConfig
from rlhf_mp.data.types import TokenBatch, Totals
from rlhf_mp.models.hf import DTYPES, load_causal_lm
from rlhf_mp.observe.footprint import held_bytes
from rlhf_mp.planner.term import Role
from rlhf_mp.train.accumulate import ForwardSettings
from rlhf_mp.train.deepspeed_engine import DeepSpeedEngine, init_distributed

SETTINGS = ForwardSettings(torch.device("cpu"), temperature=1.0, entropy_grad=False, offload_activations=False)
REDUCE_BUCKET = 200_000
CASES = [
    (stage, parameters, optimizer)
    for stage in range(4)
    for parameters, optimizer in ((False, False), (False, True), (True, True))
    if (stage == 3 or not parameters) and (stage > 0 or not optimizer)
]


def batch(vocab: int) -> TokenBatch:
    tokens = torch.randint(2, vocab, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 12)
    mask[:, 0] = 0
    return TokenBatch(
        tokens=tokens,
        mask=mask,
        rewards=torch.zeros(2),
        group_ids=torch.arange(2),
        lengths=torch.tensor([12, 12]),
        rollout_logprobs=torch.zeros(2, 12),
    )


def loss_fn(output, batch: TokenBatch, totals: Totals):
    return -(output.logprobs * batch.mask).sum() / totals.num_tokens, {}


def measure(case: tuple[int, bool, bool], model_path: str, dtype: str) -> dict[str, int]:
    """The most bytes of this rank by component, just before and after a step."""
    stage, parameters, optimizer = case
    actor = ActorConfig(
        fsdp_config=OffloadConfig(param_offload=parameters, optimizer_offload=optimizer),
        deepspeed=DeepSpeedConfig(
            zero_stage=stage, param_persistence_threshold=0, reduce_bucket_size=REDUCE_BUCKET, prefetch_bucket_size=0
        ),
    )
    engine = DeepSpeedEngine(lambda: load_causal_lm(model_path, DTYPES[dtype]), SETTINGS, actor, 1, dtype)
    found: dict[str, int] = {}

    def look(*_: object) -> None:
        for (_, component, _), size in held_bytes({Role.actor: engine}).items():
            found[component.value] = max(size, found.get(component.value, 0))

    engine.before_step = look
    sample = batch(engine.engine.module.config.vocab_size)
    engine.train_step([sample], Totals(int(sample.mask.sum()), 2), loss_fn)
    look()  # the optimizer's moments come with its first step
    engine.engine.destroy()
    return found


def main(model_path: str, out: str) -> None:
    init_distributed()
    results = [
        {"stage": case[0], "param_offload": case[1], "optimizer_offload": case[2], "dtype": dtype}
        | {"bytes": measure(case, model_path, dtype)}
        for dtype in ("float32", "bfloat16")
        for case in CASES
        if (dtype, case[0]) != ("bfloat16", 0)
    ]
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
