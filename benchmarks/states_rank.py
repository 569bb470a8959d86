"""One rank of ``benchmarks.states``: builds an engine in every layout, steps once, sums its tensors by component."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # before DeepSpeed builds a model
import torch.distributed as dist

from rlhf_mp.cluster.ranks import leave_ranks
from rlhf_mp.config.schema import ActorConfig, DeepSpeedConfig, MegatronConfig, ModelConfig, OffloadConfig
from rlhf_mp.data.types import TokenBatch, Totals
from rlhf_mp.models.heads import PolicyHead
from rlhf_mp.models.hf import DTYPES, load_causal_lm
from rlhf_mp.observe.footprint import held_bytes
from rlhf_mp.planner.term import Role
from rlhf_mp.train.accumulate import ForwardSettings
from rlhf_mp.train.base import TrainEngine

SETTINGS = ForwardSettings(torch.device("cpu"), PolicyHead())
REDUCE_BUCKET = 200_000
CASES = [
    (stage, parameters, optimizer)
    for stage in range(4)
    for parameters, optimizer in ((False, False), (False, True), (True, True))
    if (stage == 3 or not parameters) and (stage > 0 or not optimizer)
]
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
OFFLOAD = "optimizer_offload"  # of fsdp_config, whatever the backend
MEGATRON_CASES = {  # by number of ranks
    1: [{}, {"use_distributed_optimizer": False}, {OFFLOAD: True}],
    2: [
        {TP: 2}, {PP: 2}, {}, {"use_distributed_optimizer": False}, {TP: 2, "use_distributed_optimizer": False},
        {TP: 2, OFFLOAD: True}, {OFFLOAD: True},
    ],
}  # fmt: skip


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


def measure(engine: TrainEngine, vocab: int) -> dict[str, int]:
    """The most bytes of this rank by component, just before and after a step."""
    found: dict[str, int] = {}

    def look(*_: object) -> None:
        for (_, component, _), size in held_bytes({Role.actor: engine}).items():
            found[component.value] = max(size, found.get(component.value, 0))

    engine.before_step = look
    sample = batch(vocab)
    engine.train_step([sample], Totals(int(sample.mask.sum()), 2), loss_fn)
    look()  # the optimizer's moments come with its first step
    return found


def deepspeed_case(case: tuple[int, bool, bool], model_path: str, dtype: str) -> dict[str, Any]:
    from rlhf_mp.train.deepspeed_engine import DeepSpeedEngine

    stage, parameters, optimizer = case
    actor = ActorConfig(
        fsdp_config=OffloadConfig(param_offload=parameters, optimizer_offload=optimizer),
        deepspeed=DeepSpeedConfig(
            zero_stage=stage, param_persistence_threshold=0, reduce_bucket_size=REDUCE_BUCKET, prefetch_bucket_size=0
        ),
    )
    engine = DeepSpeedEngine(lambda: load_causal_lm(model_path, DTYPES[dtype]), SETTINGS, actor, 1, dtype)
    found = measure(engine, engine.engine.module.config.vocab_size)
    engine.engine.destroy()
    return {"stage": stage, "param_offload": parameters, "optimizer_offload": optimizer, "dtype": dtype, "bytes": found}


def megatron_case(case: dict[str, Any], model_path: str, dtype: str) -> dict[str, Any]:
    from megatron.core import parallel_state

    from rlhf_mp.train.megatron_engine import MegatronEngine

    knobs = {name: value for name, value in case.items() if name != OFFLOAD}
    actor = ActorConfig(
        fsdp_config=OffloadConfig(optimizer_offload=case.get(OFFLOAD, False)),
        megatron=MegatronConfig(sequence_parallel=False, **knobs),
    )
    model = ModelConfig(path=model_path, dtype=dtype, enable_gradient_checkpointing=False)
    engine = MegatronEngine(model, SETTINGS, actor, 1)
    found = measure(engine, engine.bridge.vocab_size)
    parallel_state.destroy_model_parallel()
    return {"megatron": case, "dtype": dtype, "bytes": found}


def main(backend: str, model_path: str, out: str) -> None:
    if backend == "megatron":
        from rlhf_mp.train import megatron_cpu

        megatron_cpu.install()
        dist.init_process_group("gloo")
        cases = MEGATRON_CASES[dist.get_world_size()]
        results = [megatron_case(case, model_path, dtype) for dtype in ("float32", "bfloat16") for case in cases]
    else:
        from rlhf_mp.train.deepspeed_engine import init_distributed

        init_distributed()
        results = [
            deepspeed_case(case, model_path, dtype)
            for dtype in ("float32", "bfloat16")
            for case in CASES
            if (dtype, case[0]) != ("bfloat16", 0)
        ]
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results))
    leave_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
