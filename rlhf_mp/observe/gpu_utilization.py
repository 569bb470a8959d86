"""How busy a GPU is in each phase, where NVML can be asked: with the package nvidia-ml-py."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from threading import Event, Thread

import torch

from rlhf_mp.phase import Phase

INTERVAL_S = 1.0  # NVML itself looks back over up to a second


def nvml_reader(device: torch.device) -> Callable[[], float] | None:
    """Percent of the time in which any kernel ran; None where nobody can say."""
    if device.type != "cuda" or find_spec("pynvml") is None:
        return None
    return lambda: torch.cuda.utilization(device)


class GpuUtilization:
    """Asks in a thread of its own while a phase runs."""

    def __init__(self, percent: Callable[[], float] | None, interval_s: float = INTERVAL_S):
        self.percent, self.interval_s = percent, interval_s
        self._means: dict[str, float] = {}

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        if self.percent is None:
            yield
            return
        samples: list[float] = []
        over = Event()

        def sample() -> None:
            while not over.wait(self.interval_s):
                samples.append(self.percent() / 100)

        thread = Thread(target=sample, name=f"GPU utilization in {phase.value}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        if samples:  # a shorter phase tells nothing
            self._means[f"gpu/{phase.value}_utilization"] = sum(samples) / len(samples)

    def metrics(self) -> dict[str, float]:
        """Shares of 1: of the last run of every phase that lasted long enough to be asked about."""
        return dict(self._means)
