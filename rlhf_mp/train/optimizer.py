"""The optimizer of plain torch, and the learning rate over time, which every backend shares."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

from rlhf_mp.config.schema import OptimConfig


def make_optimizer(parameters: Iterable[nn.Parameter], optim: OptimConfig) -> torch.optim.Optimizer:
    if optim.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=optim.lr, momentum=optim.momentum, weight_decay=optim.weight_decay)
    return torch.optim.AdamW(
        parameters, lr=optim.lr, betas=tuple(optim.betas), eps=optim.eps, weight_decay=optim.weight_decay
    )


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
