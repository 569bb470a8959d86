"""Memory, time and gradients of any piece of code, by hand: names that people know from other trainers.

A run measures its own phases without them, see memory_watch.py and metrics.py.
"""

import functools
import gc
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from threading import Event, Thread

import torch
import torch.distributed as dist
from torch import nn

from rlhf_mp.observe.live_tensors import live_bytes
from rlhf_mp.observe.memory import GIB, get_memory_usage, reset_peak

LEVEL_VARIABLES = ("RLHF_MP_LOGGING_LEVEL", "VERL_LOGGING_LEVEL")
LOG = logging.getLogger("rlhf_mp")


def set_logging_level() -> None:
    """From the first of ``LEVEL_VARIABLES`` that is set, e.g. ``RLHF_MP_LOGGING_LEVEL=INFO``."""
    for variable in LEVEL_VARIABLES:
        if variable in os.environ:
            LOG.setLevel(os.environ[variable].upper())
            return


def log_memory_usage(message: str, logger: logging.Logger = LOG, level: int = logging.INFO) -> None:
    """One line: what is allocated, reserved, used of the device, and fragmented."""
    usage = get_memory_usage()
    logger.log(
        level,
        "%s: %.2f GiB allocated (at most %.2f), %.2f reserved, %.0f%% of %.2f in use, %.0f%% fragmented",
        message,
        usage["allocated"],
        usage["peak_allocated"],
        usage["reserved"],
        100 * usage["utilization"],
        usage["total"],
        100 * usage["fragmentation"],
    )


def log_gpu_memory_usage(
    head: str, logger: logging.Logger = LOG, level: int = logging.INFO, rank: int | None = 0
) -> None:
    """``log_memory_usage`` on one rank; on all with ``rank=None``."""
    if rank is None or not dist.is_initialized() or dist.get_rank() == rank:
        log_memory_usage(head, logger, level)


class GPUMemoryLogger:
    """Decorator: memory before and after every call, and the most in between.

    @GPUMemoryLogger(role="actor")
    def update_actor(batch): ...
    """

    def __init__(self, role: str, logger: logging.Logger = LOG, level: int = logging.INFO, rank: int | None = 0):
        self.role, self.logger, self.level, self.rank = role, logger, level, rank

    def __call__(self, function: Callable) -> Callable:
        @functools.wraps(function)
        def measured(*args: object, **kwargs: object) -> object:
            name = f"{self.role}: {function.__name__}"
            log_gpu_memory_usage(f"before {name}", self.logger, self.level, self.rank)
            reset_peak()
            result = function(*args, **kwargs)
            log_gpu_memory_usage(f"after {name}", self.logger, self.level, self.rank)
            return result

        return measured


@contextmanager
def simple_timer(name: str, timing: MutableMapping[str, float]) -> Iterator[None]:
    """Add the body's seconds to ``timing[name]``, also if it raises."""
    began = time.perf_counter()
    try:
        yield
    finally:
        timing[name] = timing.get(name, 0.0) + time.perf_counter() - began


timer = simple_timer


def log_performance_metrics(metrics: Mapping[str, float], logger: logging.Logger = LOG) -> None:
    """One line, sorted by name."""
    logger.info("%s", "  ".join(f"{name}={value:.6g}" for name, value in sorted(metrics.items())))


def profile_memory_usage() -> dict[str, float]:
    """``get_memory_usage``, and GiB of the live tensors by what they are for."""
    usage = get_memory_usage()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return usage | {kind.replace(" ", "_"): size / GIB for kind, size in live_bytes(device).items()}


def optimize_memory_usage(model: nn.Module) -> None:
    """Turn on gradient checkpointing where the model has it, and give back what nobody holds."""
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def monitor_gradients(model: nn.Module) -> float:
    """The norm of all gradients of ``model`` on this rank; 0 without any.

    Engines report the norm over all shards in their metric ``grad_norm``.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return float(nn.utils.get_total_norm(gradients)) if gradients else 0.0


class PerformanceMonitor:
    """Looks at the memory every so often in a thread of its own.

    with PerformanceMonitor() as monitor: ...
    monitor.get_memory_stats()
    """

    def __init__(self, interval_s: float = 1.0):
        self.interval_s = interval_s
        self.samples: list[dict[str, float]] = []
        self._stop = Event()
        self._thread = Thread(target=self._watch, name="memory monitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def get_memory_stats(self) -> dict[str, float]:
        """GiB allocated now, on average and at most, the highest share of the device in use, and how many samples."""
        self.samples.append(get_memory_usage())
        allocated = [sample["allocated"] for sample in self.samples]
        return {
            "allocated": allocated[-1],
            "mean_allocated": sum(allocated) / len(allocated),
            "max_allocated": max(allocated),
            "max_utilization": max(sample["utilization"] for sample in self.samples),
            "num_samples": float(len(self.samples)),
        }

    def _watch(self) -> None:
        while not self._stop.wait(self.interval_s):
            self.samples.append(get_memory_usage())

    def __enter__(self) -> "PerformanceMonitor":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
