"""Adding metrics: of one rank's parts, and of all ranks."""

from collections.abc import Iterable

import torch.distributed as dist

from rlhf_mp.data.types import Sums

EXTREMES = {"_max": max, "_min": min}


def added(parts: Iterable[Sums]) -> Sums:
    """Sums and counts added name by name, or the largest or smallest kept of what ends in _max or _min.

    A name only some parts have keeps what those parts say; of an extreme, a part with count 0 says nothing.
    """
    total: Sums = {}
    for part in parts:
        for name, (value, count) in part.items():
            if (extreme := EXTREMES.get(name[-4:])) is not None:
                said = [pair for pair in (total.get(name), (value, count)) if pair is not None and pair[1]]
                total[name] = (extreme(v for v, _ in said), 1.0) if said else (0.0, 0.0)
                continue
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
