"""What a rank asks of CUDA's caching allocator. On a CPU there is none, and nothing is asked."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlhf_mp.phase import Phase


def limit_share(device: torch.device, fraction: float | None) -> None:
    """Keep this process's tensors within ``fraction`` of the card; more is out of memory, whatever is free."""
    if device.type == "cuda" and fraction is not None:
        torch.cuda.set_per_process_memory_fraction(fraction, device)


class EmptiedCache:
    """Gives back what the allocator holds and no tensor uses, once in so many steps.

    Args:
        every_n_steps: 0: never.
    """

    def __init__(self, device: torch.device, every_n_steps: int):
        self.every_n_steps = every_n_steps if device.type == "cuda" else 0
        self._steps = 0

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """A step trains once; engines on the same card take their memory back after that."""
        yield
        self._steps += phase is Phase.train
        if phase is Phase.train and self.every_n_steps and self._steps % self.every_n_steps == 0:
            torch.cuda.empty_cache()
