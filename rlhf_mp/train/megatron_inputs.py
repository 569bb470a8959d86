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
from rlhf_mp.models.packing import packed_row
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
    row = packed_row(batch, multiple)
    targets = torch.zeros_like(row.tokens)
    targets[0, row.source] = row.tokens[0, row.source + 1]
    params = PackedSeqParams("thd", row.starts, row.starts, max_seqlen_q=row.longest, max_seqlen_kv=row.longest)
    return ModelInput(
        row.tokens,
        targets,
        row.positions,
        params,
        restore=lambda values: row.home(values[0, row.source]),
        at_last=lambda values: values[0, row.last],
    )


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
