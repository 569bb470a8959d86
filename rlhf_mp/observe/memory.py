"""How much memory this process took."""

import resource

import psutil
import torch

GIB = 2**30


def reset_peak() -> None:
    """Start the CUDA peak of the next phase. The peak of host memory is of the whole process: it can't be reset."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_memory() -> dict[str, float]:
    """GiB: host memory now and at most so far; CUDA memory allocated at most since ``reset_peak``, with a GPU."""
    memory = {
        "memory/rss_gib": psutil.Process().memory_info().rss / GIB,
        "memory/rss_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB,  # Linux: KiB
    }
    if torch.cuda.is_available():
        memory["memory/cuda_peak_gib"] = torch.cuda.max_memory_allocated() / GIB
    return memory
