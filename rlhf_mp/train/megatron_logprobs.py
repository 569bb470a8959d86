"""Log-probs and entropy when every tensor-parallel rank holds a slice of the vocabulary."""

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor


def vocab_parallel_logprobs_and_entropy(
    logits: Float[Tensor, "N V"],
    tokens: Int[Tensor, "N"],
    group: dist.ProcessGroup,
    vocab_size: int,
    *,
    temperature: float,
    entropy_grad: bool,
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
    """log p(token) and the entropy (nats) of the distribution ``softmax(logits / temperature)``, on every rank.

    Args:
        logits: this rank's slice; rank r of the group holds columns r * V to (r + 1) * V. They are left as they are.
        vocab_size: real tokens. Columns beyond pad the vocabulary to a round size and get no probability.
        entropy_grad: False saves the backward pass through the entropy.
    """
    return _LogprobsAndEntropy.apply(logits, tokens, group, vocab_size, temperature, entropy_grad)


class _LogprobsAndEntropy(torch.autograd.Function):
    """One MAX and one SUM over the group forward, none backward."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        tokens: Tensor,
        group: dist.ProcessGroup,
        vocab_size: int,
        temperature: float,
        entropy_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        x = logits.float() / temperature
        width = x.shape[-1]
        first = group.rank() * width
        if first + width > vocab_size:
            x[:, max(vocab_size - first, 0) :] = float("-inf")
        largest = x.max(-1).values
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        x -= largest[:, None]
        is_mine = (tokens >= first) & (tokens < first + width)
        column = (tokens - first).clamp(0, width - 1)[:, None]
        chosen = x.gather(-1, column)[:, 0].masked_fill(~is_mine, 0.0)
        p = x.exp()
        weighted = (p * x.masked_fill(p == 0, 0.0)).sum(-1)  # 0 * -inf would be nan
        sums = torch.stack([chosen, p.sum(-1), weighted])
        dist.all_reduce(sums, group=group)
        chosen, z, weighted = sums
        log_z = z.log()
        entropy = log_z - weighted / z
        ctx.save_for_backward(x.sub_(log_z[:, None]), column, is_mine, entropy)
        ctx.temperature, ctx.dtype, ctx.entropy_grad = temperature, logits.dtype, entropy_grad
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return chosen - log_z, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        log_p, column, is_mine, entropy = ctx.saved_tensors
        p = log_p.exp()
        grad = -p * grad_logprobs[:, None]
        if ctx.entropy_grad:
            grad -= grad_entropy[:, None] * p * (log_p.masked_fill(p == 0, 0.0) + entropy[:, None])
        grad.scatter_add_(-1, column, (grad_logprobs * is_mine)[:, None])
        return (grad / ctx.temperature).to(ctx.dtype), None, None, None, None, None
