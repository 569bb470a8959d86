"""How much memory this process takes, and what the device it computes on has left."""

from pathlib import Path

import psutil
import torch

GIB = 2**30
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_highest = 0  # host peak of this process before the last reset


def reset_peak() -> None:
    """Start the peaks of the next phase: CUDA's, and that of host memory where Linux lets a process do so."""
    global _highest
    _highest = max(_highest, host_peak())
    if CLEAR_REFS.exists():
        CLEAR_REFS.write_text("5")  # man 5 proc: resets the peak resident set
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def host_peak() -> int:
    """Bytes resident at most since ``reset_peak``."""
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def peak_memory() -> dict[str, float]:
    """GiB: host memory now and at most so far; CUDA memory allocated at most since ``reset_peak``, with a GPU."""
    memory = {
        "memory/rss_gib": psutil.Process().memory_info().rss / GIB,
        "memory/rss_peak_gib": max(_highest, host_peak()) / GIB,
    }
    if torch.cuda.is_available():
        memory["memory/cuda_peak_gib"] = torch.cuda.max_memory_allocated() / GIB
    return memory


def get_memory_usage(device: torch.device | str | None = None) -> dict[str, float]:
    """GiB of a CUDA device as its allocator and its driver see it; of the host without one.

    Returns:
        ``allocated``, ``reserved`` and their ``peak_`` since the last reset; ``free`` and ``total`` of the device,
        other processes' use included; ``utilization`` and ``fragmentation`` as shares of 1; and how often the allocator
        had to flush and retry, ``num_retries``. On the host what is resident counts as allocated and as reserved.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        free, total = torch.cuda.mem_get_info(device)
        retries = stats["num_alloc_retries"]
    else:
        host = psutil.virtual_memory()
        allocated = reserved = psutil.Process().memory_info().rss
        peaks, free, total, retries = (host_peak(),) * 2, host.available, host.total, 0
    return {
        "allocated": allocated / GIB,
        "reserved": reserved / GIB,
        "peak_allocated": peaks[0] / GIB,
        "peak_reserved": peaks[1] / GIB,
        "free": free / GIB,
        "total": total / GIB,
        "utilization": 1 - free / total,
        "fragmentation": 1 - allocated / reserved if reserved else 0.0,
        "num_retries": float(retries),
    }
