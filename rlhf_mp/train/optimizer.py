"""The learning rate over time, shared by every backend."""

import math
from collections.abc import Callable

from rlhf_mp.config.schema import OptimConfig


def learning_rate_factor(optim: OptimConfig, num_steps: int) -> Callable[[int], float]:
    """Factor on ``optim.lr`` at optimizer step 0, 1, ...: linear warm-up, then the chosen decay."""
    warmup = optim.lr_warmup_steps

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if optim.lr_scheduler_type == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
        shape = 1 - progress if optim.lr_scheduler_type == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * shape

    return factor
