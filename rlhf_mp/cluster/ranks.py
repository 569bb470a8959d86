"""The launched ranks among themselves: torch.distributed, or nothing for a single process."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """Object-level collectives, for set-up and small messages."""

    def __init__(self, rank: int, num_ranks: int):
        self.rank, self.num_ranks = rank, num_ranks

    def barrier(self) -> None:
        if self.num_ranks > 1:
            dist.barrier()

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.num_ranks == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        if self.num_ranks == 1:
            return [value]
        values = [None] * self.num_ranks
        dist.all_gather_object(values, value)
        return values

    def sum(self, tensor: Tensor) -> Tensor:
        """All ranks' small tensors added in the order of ranks, so alike on every rank."""
        return torch.stack(self.gather(tensor)).sum(0)
