"""Forward passes over micro-batches, the part all backends that hold a plain module share."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlhf_mp.data.types import LossFn, Sums, TokenBatch, Totals
from rlhf_mp.models.heads import Head
from rlhf_mp.train.activation_offload import ActivationOffload, decoder_layers


@dataclass(frozen=True)
class ForwardSettings:
    """How a backend runs its module."""

    device: torch.device
    head: Head
    offload_layers: int | None = None  # activations go to the host by groups of so many layers, see activation_offload
    autocast: torch.dtype | None = None  # compute type when the module holds float32 weights but trains in less

    def around_forward(self) -> AbstractContextManager:
        if self.autocast is not None:
            return torch.autocast(self.device.type, self.autocast)
        return nullcontext()


@torch.no_grad()
def score(module: nn.Module, micro_batches: Sequence[TokenBatch], settings: ForwardSettings) -> list[Tensor]:
    """What the model's head says of each micro-batch, on CPU."""
    results = []
    for batch in micro_batches:
        batch = batch.to(settings.device)
        with settings.around_forward():
            output = settings.head.forward(module, batch)
        results.append(settings.head.score(output, batch).cpu())
    return results


def losses(
    module: nn.Module,
    micro_batches: Sequence[TokenBatch],
    totals: Totals,
    loss_fn: LossFn,
    settings: ForwardSettings,
    add: Callable[[dict[str, tuple[Tensor, Tensor]]], None],
) -> Iterator[Tensor]:
    """The loss of each micro-batch in turn, for the caller to send backward before it asks for the next."""
    offload = None
    if settings.offload_layers is not None:
        offload = ActivationOffload(decoder_layers(module), settings.device, settings.offload_layers)
    for batch in micro_batches:
        batch = batch.to(settings.device)
        with offload.saving() if offload else nullcontext(), settings.around_forward():
            output = settings.head.forward(module, batch)
            loss, metrics = loss_fn(output, batch, totals)
        add(metrics)
        yield contagious(loss)
    if offload:
        add({"activation_offload_gb": (torch.tensor(offload.num_bytes / 1e9), torch.tensor(1.0))})


def contagious(loss: Tensor) -> Tensor:
    """``loss``, and where it is no finite number its gradient is none either.

    So the gradient's norm, which all ranks have in common, tells them all to skip the step, with no further collective.
    """
    return loss * torch.where(loss.detach().isfinite(), torch.ones_like(loss), torch.full_like(loss, torch.nan))


class MetricSums:
    """Adds metrics on the device; one transfer at the end instead of one a value."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, metrics: dict[str, tuple[Tensor, Tensor]]) -> None:
        for name, (total, count) in metrics.items():
            pair = torch.stack(
                [torch.as_tensor(total).detach().double(), torch.as_tensor(count, device=total.device).double()]
            )
            self._sums[name] = joined(name, self._sums[name], pair) if name in self._sums else pair

    def result(self) -> Sums:
        return {name: (pair[0].item(), pair[1].item()) for name, pair in self._sums.items()}


def joined(name: str, one: Tensor, other: Tensor) -> Tensor:
    """Two (sum, count) of one metric: added, or of what ends in _max or _min the larger or smaller that has a count."""
    if name[-4:] not in ("_max", "_min"):
        return one + other
    wins = (one[0] > other[0]) == name.endswith("_max")
    return torch.where((one[1] > 0) & (wins | (other[1] == 0)), one, other)
