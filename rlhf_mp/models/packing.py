"""Sequences one after the other in a single row, instead of padded to the longest of a micro-batch.

Shapes: B sequences, T tokens per padded sequence, P positions of the row, S of them that predict a token.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_mp.data.types import TokenBatch


@dataclass(frozen=True)
class PackedRow:
    """A micro-batch as one row. Positions count from 0 in every sequence."""

    tokens: Int[Tensor, "1 P"]
    positions: Int[Tensor, "1 P"]
    starts: Int[Tensor, "B+1"]  # int32: where each sequence begins, and where the last ends
    lengths: tuple[int, ...]  # of the sequences, each with what lengthens it
    source: Int[Tensor, "S"]  # positions that predict a token: all but each sequence's last
    destination: Int[Tensor, "S"]  # where that token is in the flattened [B, T]
    last: Int[Tensor, "B"]  # position of each sequence's last token
    shape: torch.Size  # [B, T]

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def home(self, values: Float[Tensor, "S"], chosen: Tensor | None = None) -> Float[Tensor, "B T"]:
        """Values at ``source`` (or the ``chosen`` of it) to the tokens they are of, 0 elsewhere. Differentiable."""
        places = self.destination if chosen is None else self.destination[chosen]
        return values.new_zeros(self.shape.numel()).index_copy(0, places, values).view(self.shape)

    def attention_inputs(self) -> dict[str, object]:
        """What a transformers model takes beside ``input_ids``, for packed_attention.py and for flash attention."""
        return {
            "position_ids": self.positions,
            "sequence_lengths": self.lengths,
            "cu_seq_lens_q": self.starts,
            "cu_seq_lens_k": self.starts,
            "max_length_q": self.longest,
            "max_length_k": self.longest,
        }


def packed_row(batch: TokenBatch, multiple: int = 1) -> PackedRow:
    """All sequences of ``batch`` without the padding between them.

    Args:
        multiple: each sequence is lengthened to be divisible by it.
    """
    shape, device = batch.tokens.shape, batch.tokens.device
    real = batch.lengths.clamp(max=shape[1])  # of an empty micro-batch's stub, lengths are longer
    slots = (real + multiple - 1) // multiple * multiple
    starts = F.pad(slots.cumsum(0), (1, 0))
    row = torch.arange(len(slots), device=device).repeat_interleave(slots)  # [P] -> sequence
    positions = torch.arange(len(row), device=device) - starts[row]
    is_real = positions < real[row]
    tokens = torch.where(is_real, batch.tokens[row, positions.clamp(max=shape[1] - 1)], 0)
    source = (positions < real[row] - 1).nonzero()[:, 0]
    return PackedRow(
        tokens=tokens[None],
        positions=torch.where(is_real, positions, 0)[None],
        starts=starts.int(),
        lengths=tuple(slots.tolist()),
        source=source,
        destination=row[source] * shape[1] + positions[source] + 1,
        last=starts[:-1] + real - 1,
        shape=shape,
    )
