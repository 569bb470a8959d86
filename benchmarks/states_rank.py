"""One rank of ``benchmarks.states``: builds every ZeRO stage and offload, steps once, sums its tensors by component."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import torch._dynamo  # before DeepSpeed builds a model
import torch.distributed as dist
from torch import Tensor

from rlhf_mp.config.schema import ActorConfig, DeepSpeedConfig, OffloadConfig
from rlhf_mp.data.types import TokenBatch, Totals
from rlhf_mp.models.heads import PolicyHead
from rlhf_mp.models.hf import DTYPES, load_causal_lm
from rlhf_mp.train.accumulate import ForwardSettings
from rlhf_mp.train.deepspeed_engine import DeepSpeedEngine, init_distributed

SETTINGS = ForwardSettings(torch.device("cpu"), PolicyHead())
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


class Tensors:
    """Sums storages, each once, under the first component that names it."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def bytes_of(self, tensors: Iterable[Tensor | None]) -> int:
        found = 0
        for tensor in tensors:
            if tensor is None or tensor.untyped_storage()._cdata in self.seen:
                continue
            self.seen.add(tensor.untyped_storage()._cdata)
            found += tensor.untyped_storage().nbytes()
        return found


def gradients(engine, master: list[Tensor]) -> Iterable[Tensor | None]:
    """Wherever a stage keeps them between backward pass and step."""
    optimizer = engine.optimizer
    yield from (p.grad for p in engine.module.parameters())
    yield from (part.grad for part in master)
    if engine.zero_optimization_stage() == 3:
        yield optimizer.grad_partitions_flat_buffer
    elif engine.zero_optimization_stage() > 0:
        for parts in optimizer.averaged_gradients.values():
            yield from ([parts] if isinstance(parts, Tensor) else parts or [])


def master_weights(engine) -> list[Tensor]:
    stage = engine.zero_optimization_stage()
    if stage == 3:
        return engine.optimizer.fp32_partitioned_groups_flat
    return engine.optimizer.single_partition_of_fp32_groups if stage > 0 else []


def measure(case: tuple[int, bool, bool], model_path: str, dtype: str) -> dict[str, int]:
    """Bytes of this rank by component: gradients just before the step, everything else after it."""
    stage, parameters, optimizer = case
    actor = ActorConfig(
        fsdp_config=OffloadConfig(param_offload=parameters, optimizer_offload=optimizer),
        deepspeed=DeepSpeedConfig(
            zero_stage=stage, param_persistence_threshold=0, reduce_bucket_size=REDUCE_BUCKET, prefetch_bucket_size=0
        ),
    )
    engine = DeepSpeedEngine(lambda: load_causal_lm(model_path, DTYPES[dtype]), SETTINGS, actor, 1, dtype)
    inner, found = engine.engine, {}
    step = inner.step

    def measured_step() -> None:
        tensors = Tensors()
        weights = (p.ds_tensor if stage == 3 else p.data for p in inner.module.parameters())
        found["weights"] = tensors.bytes_of(weights)
        found["master weights"] = tensors.bytes_of(master_weights(inner))
        found["gradients"] = tensors.bytes_of(gradients(inner, master_weights(inner)))
        step()
        states = inner.basic_optimizer.state.values()
        found["optimizer moments"] = tensors.bytes_of(
            value for state in states for value in state.values() if isinstance(value, Tensor) and value.numel() > 1
        )

    inner.step = measured_step
    sample = batch(inner.module.config.vocab_size)
    engine.train_step([sample], Totals(int(sample.mask.sum()), 2), loss_fn)
    inner.destroy()
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
