"""One process, plain PyTorch: the reference that the other engines are tested against."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_mp.config.schema import TrainedConfig
from rlhf_mp.data.types import LossFn, Sums, TokenBatch, Totals
from rlhf_mp.models.merge import Stored, checkpoint_tensors
from rlhf_mp.planner.term import Component
from rlhf_mp.train import accumulate
from rlhf_mp.train.accumulate import ForwardSettings, MetricSums
from rlhf_mp.train.base import ParallelLayout, Writing, unobserved
from rlhf_mp.train.optimizer import learning_rate_factor, make_optimizer
from rlhf_mp.train.snapshot import Snapshot

FILE = "torch_engine.pt"


class TorchScorer:
    """A frozen model in one process."""

    layout = ParallelLayout(dp_rank=0, dp_size=1, is_output_rank=True)

    def __init__(self, module: nn.Module, settings: ForwardSettings):
        self.module = module.to(settings.device).eval()
        self.settings = settings

    def score(self, micro_batches: Sequence[TokenBatch]) -> list[Tensor]:
        return accumulate.score(self.module, micro_batches, self.settings)

    def tensors(self) -> Iterator[tuple[Component, Tensor]]:
        for parameter in self.module.parameters():
            yield Component.weights, parameter.data
            if parameter.grad is not None:
                yield Component.gradients, parameter.grad


class TorchEngine(TorchScorer):
    """The same model, trained."""

    def __init__(self, module: nn.Module, settings: ForwardSettings, trained: TrainedConfig, num_steps: int):
        super().__init__(module, settings)
        self.before_step = unobserved
        self.grad_clip = trained.grad_clip
        self.optimizer = make_optimizer([p for p in module.parameters() if p.requires_grad], trained.optim)
        factor = learning_rate_factor(trained.optim, num_steps)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)

    def score(self, micro_batches: Sequence[TokenBatch]) -> list[Tensor]:
        self.module.eval()
        return super().score(micro_batches)

    def train_step(self, micro_batches: Sequence[TokenBatch], totals: Totals, loss_fn: LossFn) -> Sums:
        self.module.train()
        sums = MetricSums()
        for loss in accumulate.losses(self.module, micro_batches, totals, loss_fn, self.settings, sums.add):
            loss.backward()
        self.before_step(micro_batches)
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.grad_clip or float("inf"))
        lr = self.schedule.get_last_lr()[0]
        if norm.isfinite():
            self.optimizer.step()
            self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return sums.result() | {"grad_norm": (norm.item(), 1), "lr": (lr, 1)}

    def tensors(self) -> Iterator[tuple[Component, Tensor]]:
        yield from super().tensors()
        for state in self.optimizer.state.values():
            moments = (value for value in state.values() if isinstance(value, Tensor) and value.numel() > 1)
            yield from ((Component.optimizer, moment) for moment in moments)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.full(checkpoint_tensors(self.module))

    def full(self, stored: Iterable[Stored]) -> Iterator[tuple[str, Tensor]]:
        return ((tensor.name, tensor.value()) for tensor in stored)

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        torch.save(self._state(), directory / FILE)

    def snapshot(self, directory: Path) -> Writing:
        taken = Snapshot()
        taken.add(directory / FILE, self._state())
        return taken

    def _state(self) -> dict[str, Any]:
        parts = {"module": self.module, "optimizer": self.optimizer, "schedule": self.schedule}
        return {name: part.state_dict() for name, part in parts.items()}

    def load(self, directory: Path) -> None:
        state = torch.load(directory / FILE, map_location=self.settings.device, weights_only=True)
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
