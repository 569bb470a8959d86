"""Which CPU cores this process runs on."""

import contextlib
import os
from collections.abc import Sequence

import torch


def compute_on(cores: Sequence[int]) -> None:
    """All threads of this process stay on ``cores``, and no more of them than cores compute at once.

    Several threads of OpenMP on one core wait for each other by spinning: a hundred times slower than one.
    """
    keep_to(cores)
    threads = min(torch.get_num_threads(), len(cores))
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # DeepSpeed's optimizer, loaded later, has an OpenMP of its own


def keep_to(cores: Sequence[int]) -> None:
    """All threads that this process has, and those it will have, run on ``cores``."""
    os.sched_setaffinity(0, cores)
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), cores)
