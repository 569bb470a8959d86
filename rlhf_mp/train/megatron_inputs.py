"""Micro-batches as a Megatron model takes them, and its results per token back as ours.

The model predicts from position t the token at t + 1; our fields are aligned on the token that is scored.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rlhf_mp.data.types import TokenBatch
from rlhf_mp.train.megatron_layers import zigzag_positions


@dataclass(frozen=True)
class ModelInput:
    """What one rank feeds its part of the model."""

    tokens: Int[Tensor, "b s"]
    targets: Int[Tensor, "b s"]  # the token after each; 0 after the last
    positions: Int[Tensor, "b s"]
    packed: PackedSeqParams | None
    restore: Callable[[Float[Tensor, "b s"]], Float[Tensor, "B T"]]
    """From values of ``targets`` to values of the batch's own tokens, 0 where none was predicted. Differentiable."""
    at_last: Callable[[Float[Tensor, "b s"]], Float[Tensor, "B"]]
    """From values of ``tokens`` to the one of each row's last token. Differentiable."""


def padded(batch: TokenBatch, context_group: dist.ProcessGroup, multiple: int) -> ModelInput:
    """Rows as they are, a little longer, cut among the ranks of ``context_group``.

    Args:
        multiple: each rank's part must be divisible by it (sequence parallelism cuts it further).
    """
    ranks, width = context_group.size(), batch.tokens.shape[1]
    parts = 2 * ranks if ranks > 1 else 1  # see zigzag_positions
    length = -(-width // (parts * multiple)) * parts * multiple
    tokens = F.pad(batch.tokens, (0, length - width))
    targets = F.pad(tokens[:, 1:], (0, 1))
    if ranks == 1:
        own = torch.arange(length, device=tokens.device)
        whole = lambda values: values  # noqa: E731
    else:
        own = zigzag_positions(context_group.rank(), ranks, length, tokens.device)
        whole = lambda values: _GatherPositions.apply(values, context_group)  # noqa: E731

    def restore(values: Tensor) -> Tensor:
        return F.pad(whole(values)[:, : width - 1], (1, 0))

    def at_last(values: Tensor) -> Tensor:
        last = batch.lengths.clamp(max=width) - 1
        return whole(values).gather(1, last[:, None])[:, 0]

    positions = own.expand(len(tokens), -1).contiguous()
    return ModelInput(tokens[:, own].contiguous(), targets[:, own], positions, None, restore, at_last)


def packed(batch: TokenBatch, multiple: int) -> ModelInput:
    """All sequences in one row, without the padding between them.

    Args:
        multiple: each sequence is lengthened to be divisible by it.
    """
    rows, width = batch.tokens.shape
    device = batch.tokens.device
    lengths = batch.lengths.clamp(max=width).tolist()
    slots = [-(-length // multiple) * multiple for length in lengths]
    ends = torch.tensor(slots, device=device).cumsum(0)
    starts = F.pad(ends, (1, 0)).int()
    tokens, targets, positions = (torch.zeros(1, sum(slots), dtype=torch.long, device=device) for _ in range(3))
    source, destination = [], []  # where a value is found, and where in the flattened [B, T] it belongs
    for row, (length, start) in enumerate(zip(lengths, starts[:-1].tolist(), strict=True)):
        tokens[0, start : start + length] = batch.tokens[row, :length]
        targets[0, start : start + length - 1] = batch.tokens[row, 1:length]
        positions[0, start : start + length] = torch.arange(length, device=device)
        source.append(torch.arange(start, start + length - 1))
        destination.append(torch.arange(1, length) + row * width)
    source, destination = torch.cat(source).to(device), torch.cat(destination).to(device)

    def restore(values: Tensor) -> Tensor:
        return values.new_zeros(rows * width).index_copy(0, destination, values[0, source]).view(rows, width)

    last = starts[:-1] + torch.tensor(lengths, device=device) - 1
    longest = max(slots)
    params = PackedSeqParams("thd", starts, starts, max_seqlen_q=longest, max_seqlen_kv=longest)
    return ModelInput(tokens, targets, positions, params, restore, lambda values: values[0, last])


class _GatherPositions(torch.autograd.Function):
    """Values of all positions, in order, from the ranks' zigzag parts.

    Every rank computes the whole loss from them, so backward each keeps the gradient of its own part; the parts'
    contributions to the weights are added later, with the data-parallel ranks'.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        rows, own_length = values.shape
        parts = [torch.empty_like(values) for _ in range(group.size())]
        dist.all_gather(parts, values.contiguous(), group=group)
        length = own_length * group.size()
        order = [zigzag_positions(rank, group.size(), length, values.device) for rank in range(group.size())]
        whole = values.new_empty(rows, length)
        whole[:, torch.cat(order)] = torch.cat(parts, dim=1)
        ctx.own = order[group.rank()]
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[:, ctx.own], None
