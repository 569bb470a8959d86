"""Optimizer steps as short as DeepSpeed and Megatron-Core allow: what our engines are measured against.

Forward, clipped policy gradient, backward, step: no metrics, no entropy, no chunks, no checks.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_mp.data.types import TokenBatch

Step = Callable[[Sequence[TokenBatch], int], None]
"""(micro-batches, tokens of the mini-batch): one optimizer step."""


def surrogate_loss(logprobs: Tensor, batch: TokenBatch, num_tokens: int) -> Tensor:
    """Of the tokens after the first."""
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs[:, 1:]
    ratio, advantages = (logprobs - old).exp(), batch.advantages[:, 1:]
    surrogate = (ratio * advantages).minimum(ratio.clamp(0.8, 1.28) * advantages)
    return -(surrogate * batch.mask[:, 1:]).sum() / num_tokens


def bare_deepspeed(job: Any) -> Step:
    """DeepSpeed as its own tutorial starts it, with the same JSON as our engine."""
    import deepspeed
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    from rlhf_mp.models.heads import PolicyHead
    from rlhf_mp.train.build import model_builder
    from rlhf_mp.train.deepspeed_config import train_config

    policy = job.config.actor_rollout_ref
    config = train_config(policy.actor, dtype=policy.model.dtype, on_cpu=job.device.type == "cpu")
    keep_alive = HfDeepSpeedConfig(config)
    module = model_builder(policy.model, "deepspeed", PolicyHead())()
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
    del keep_alive

    def step(micro_batches: Sequence[TokenBatch], num_tokens: int) -> None:
        engine.train()
        for index, batch in enumerate(micro_batches, start=1):
            batch = batch.to(job.device)
            logits = engine(input_ids=batch.tokens, use_cache=False).logits[:, :-1].float()
            logprobs = logits.log_softmax(-1).gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
            engine.set_gradient_accumulation_boundary(index == len(micro_batches))
            engine.backward(surrogate_loss(logprobs, batch, num_tokens))
        engine.step()

    return step


def bare_megatron(job: Any) -> Step:
    """Megatron's schedule over its own cross-entropy; model and optimizer are built like our engine's."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from rlhf_mp.train.build import make_actor

    engine = make_actor(job.config, job.device, num_updates=1)
    (model,) = engine.models  # no virtual stages
    layout = job.config.actor_rollout_ref.actor.megatron
    multiple = layout.tensor_model_parallel_size if layout.sequence_parallel else 1

    def loss_of(batch: TokenBatch, num_tokens: int, nll: Tensor) -> tuple[Tensor, Tensor, dict]:
        loss = surrogate_loss(-nll[:, : batch.tokens.shape[1] - 1].float(), batch, num_tokens)
        return loss, torch.ones((), dtype=torch.int, device=nll.device), {}

    def step(micro_batches: Sequence[TokenBatch], num_tokens: int) -> None:
        def forward(batches: Iterator[TokenBatch], model: torch.nn.Module) -> tuple[Tensor, Callable]:
            batch = next(batches).to(job.device)
            tokens = F.pad(batch.tokens, (0, -batch.tokens.shape[1] % multiple))
            positions = torch.arange(tokens.shape[1], device=job.device).expand_as(tokens)
            labels = F.pad(tokens[:, 1:], (0, 1))
            output = model(input_ids=tokens, position_ids=positions, attention_mask=None, labels=labels)
            return output, partial(loss_of, batch, num_tokens)

        model.train()
        model.zero_grad_buffer()
        engine.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(micro_batches),
            model=model,
            num_microbatches=len(micro_batches),
            seq_length=max(batch.tokens.shape[1] + -batch.tokens.shape[1] % multiple for batch in micro_batches),
            micro_batch_size=1,
            forward_only=False,
        )
        engine.optimizer.step()

    return step


BARE: dict[str, Callable[[Any], Step]] = {"deepspeed": bare_deepspeed, "megatron": bare_megatron}
"""By ``actor.strategy``."""
