"""Adding metrics: of one rank's parts, and of all ranks."""

from collections.abc import Iterable

import torch.distributed as dist

from rlhf_mp.data.types import Sums


def added(parts: Iterable[Sums]) -> Sums:
    """Sums and counts added name by name; a name only some parts have keeps what those parts say."""
    total: Sums = {}
    for part in parts:
        for name, (value, count) in part.items():
            value_before, count_before = total.get(name, (0.0, 0.0))
            total[name] = (value_before + value, count_before + count)
    return total


def reduce_over_ranks(sums: Sums) -> Sums:
    """The sums of all ranks, on every rank. Collective; one process without a process group is all ranks.

    Objects, not tensors: ranks may hold different names (only rank 0 has the rollout's metrics).
    """
    if not dist.is_initialized():
        return sums
    gathered: list[Sums] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, sums)
    return added(gathered)
