"""Log-probs and entropy straight from hidden states: logits exist for some positions at a time, and never all of them.

Shapes: N positions, H hidden size, V vocabulary (of this rank's slice, where ranks share it).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LOGIT_BYTES = 4  # they are compared and summed in float32, whatever the head computes in
NEVER = -1e30  # logit of a token that does not exist; not -inf, because 0 * -inf is nan


@dataclass(frozen=True)
class Scoring:
    """What is computed of each position's logits, and how many there may be at once."""

    temperature: float
    entropy_grad: bool  # False saves the backward pass through the entropy
    chunk_bytes: int  # of float32 logits at once; 0: all

    def cut(self, num_positions: int, vocabulary: int) -> list[slice]:
        """As few chunks of equal size as allowed."""
        most = self.chunk_bytes // (LOGIT_BYTES * vocabulary) if self.chunk_bytes else num_positions
        num_chunks = -(-num_positions // max(1, most))
        size = -(-num_positions // max(1, num_chunks))
        return [slice(start, min(start + size, num_positions)) for start in range(0, num_positions, max(1, size))]


@dataclass(frozen=True)
class VocabularySlices:
    """Rank r of the group holds rows r * V to (r + 1) * V of the head."""

    group: dist.ProcessGroup
    vocab_size: int  # real tokens; rows beyond pad the vocabulary to a round size and get no probability


def head_outputs(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    bias: Float[Tensor, "V"] | None,
    tokens: Int[Tensor, "N"],
    scoring: Scoring,
    slices: VocabularySlices | None = None,
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
    """log p(token) and the entropy (nats) of ``softmax((hidden @ weight.T + bias) / temperature)``, in float32.

    The backward pass is exact: it computes each chunk's logits again. A single chunk keeps its logits instead.

    Args:
        slices: where ranks share the vocabulary. The results are then equal on all of them, and the gradient of
            ``hidden`` is this rank's part of a sum.
    """
    return _HeadOutputs.apply(hidden, weight, bias, tokens, scoring, slices)


class _HeadOutputs(torch.autograd.Function):
    """Forward one MAX and one SUM over the group for each chunk, backward nothing.

    ``weight`` is saved as it is, not a view of it: under ZeRO-3 it is empty between the passes, and gathered again by
    the time of the second.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        scoring: Scoring,
        slices: VocabularySlices | None,
    ) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        ctx.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        ctx.scoring, ctx.slices = scoring, slices
        results = torch.empty(3, len(hidden), device=hidden.device)  # log-probs, entropy, log of the normaliser
        chunks, kept = scoring.cut(len(hidden), len(weight)), None
        with torch.autocast(device, enabled=False):
            matrix, offset = weight.to(ctx.dtype), None if bias is None else bias.to(ctx.dtype)
            for rows in chunks:
                logits = _logits(hidden[rows].to(ctx.dtype), matrix, offset, scoring, slices)
                results[:, rows] = _statistics(logits, tokens[rows], slices)
                kept = logits if len(chunks) == 1 else None
                del logits  # before the next chunk's are made
        logprobs, entropy, log_z = results.unbind()
        ctx.save_for_backward(hidden, weight, bias, tokens, log_z, entropy, kept)
        if not scoring.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens, log_z, entropy, kept = ctx.saved_tensors
        scoring, slices = ctx.scoring, ctx.slices
        matrix, offset = weight.to(ctx.dtype), None if bias is None else bias.to(ctx.dtype)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = grad_bias = None
        for rows in scoring.cut(len(hidden), len(weight)):
            states = hidden[rows].to(ctx.dtype)
            logits = _logits(states, matrix, offset, scoring, slices) if kept is None else kept.clone()
            flow = grad_entropy[rows] if scoring.entropy_grad else None
            grad = _gradient(logits, tokens[rows], log_z[rows], entropy[rows], grad_logprobs[rows], flow, slices)
            grad = (grad if scoring.temperature == 1.0 else grad.div_(scoring.temperature)).to(ctx.dtype)
            del logits
            if wants_hidden:
                grad_hidden[rows] = grad @ matrix
            if wants_weight:
                grad_weight = _add_product(grad_weight, grad, states, weight.dtype)
            if wants_bias:
                part = grad.sum(0).to(bias.dtype)
                grad_bias = part if grad_bias is None else grad_bias.add_(part)
            del grad
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _logits(
    hidden: Tensor, matrix: Tensor, bias: Tensor | None, scoring: Scoring, slices: VocabularySlices | None
) -> Float[Tensor, "n V"]:
    """After temperature."""
    logits = F.linear(hidden, matrix, bias).float()
    if scoring.temperature != 1.0:
        logits.div_(scoring.temperature)
    if slices is not None:
        real = slices.vocab_size - slices.group.rank() * len(matrix)
        logits[:, max(real, 0) :] = NEVER
    return logits


def _place(tokens: Tensor, width: int, slices: VocabularySlices | None) -> tuple[Tensor, Tensor]:
    """Each token's column in this slice, and whether it is in it."""
    columns = tokens if slices is None else tokens - slices.group.rank() * width
    return columns.clamp(0, width - 1)[:, None], (columns >= 0) & (columns < width)


def _statistics(logits: Tensor, tokens: Tensor, slices: VocabularySlices | None) -> Float[Tensor, "3 n"]:
    """Log-probs, entropy and the log of the normaliser: each slice's own, weighted with its share of probability."""
    columns, is_mine = _place(tokens, logits.shape[1], slices)
    chosen = logits.gather(-1, columns)[:, 0]
    log_z = logits.logsumexp(-1)
    entropy = log_z - (logits - log_z[:, None]).exp_().mul_(logits).sum(-1)
    if slices is None:
        return torch.stack([chosen - log_z, entropy, log_z])
    largest = log_z.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=slices.group)
    log_share = log_z - largest  # of the probability, up to a constant
    share = log_share.exp()
    sums = torch.stack([(chosen - largest).masked_fill(~is_mine, 0.0), share, share * (entropy - log_share)])
    dist.all_reduce(sums, group=slices.group)
    chosen, total, surprise = sums
    return torch.stack([chosen - total.log(), surprise / total + total.log(), largest + total.log()])


def _gradient(
    logits: Tensor,
    tokens: Tensor,
    log_z: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    slices: VocabularySlices | None,
) -> Float[Tensor, "n V"]:
    """Of the logits, in their place: p * (-dl - dh * (log p + entropy)), and dl at the token itself.

    Args:
        grad_logprobs: dl.
        grad_entropy: dh; None: nobody asks for it.
    """
    columns, is_mine = _place(tokens, logits.shape[1], slices)
    log_p = logits.sub_(log_z[:, None])
    if grad_entropy is None:
        grad = log_p.exp_().mul_(-grad_logprobs[:, None])
    else:
        p = log_p.exp()
        grad = log_p.add_(entropy[:, None]).mul_(-grad_entropy[:, None]).sub_(grad_logprobs[:, None]).mul_(p)
    return grad.scatter_add_(-1, columns, (grad_logprobs * is_mine)[:, None])


def _add_product(total: Tensor | None, grad: Tensor, hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """``total + grad.T @ hidden``, in the place of ``total``: the head's gradient is as large as the head."""
    if total is None:
        return (grad.T @ hidden).to(dtype)
    if total.dtype == grad.dtype:
        return total.addmm_(grad.T, hidden)
    return total.add_(grad.T @ hidden)


@contextmanager
def standing_in(head: nn.Module, forward: Callable) -> Iterator[None]:
    """Calls of ``head`` run ``forward`` instead of its own, inside its hooks: ZeRO-3's gather the weight as always."""
    own = vars(head).get("forward")
    head.forward = forward
    try:
        yield
    finally:
        del head.forward
        if own is not None:
            head.forward = own
