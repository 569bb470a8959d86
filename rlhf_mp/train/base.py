"""What a training backend must do. TorchEngine is the smallest thing that does it, and the oracle for the others."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from rlhf_mp.data.types import LossFn, Sums, TokenBatch, Totals
from rlhf_mp.models.merge import Stored
from rlhf_mp.planner.term import Component


@dataclass(frozen=True)
class ParallelLayout:
    """One rank's place among the ranks. Those of equal ``dp_rank`` hold parts of one model and get the same data."""

    dp_rank: int
    dp_size: int
    is_output_rank: bool  # the one of these ranks whose sums count: the others hold the same, or nothing


class Scorer(Protocol):
    """A model spread over the launched ranks. Every method is collective: all ranks call it, in the same order."""

    layout: ParallelLayout

    def score(self, micro_batches: Sequence[TokenBatch]) -> list[Tensor]:
        """What the model's head says of each micro-batch, without gradient, on CPU.

        Returns:
            Log-probs of a policy and values of a critic: [B T], 0 at t = 0 and on padding; rewards of a reward
            model: [B].
        """
        ...

    def tensors(self) -> Iterator[tuple[Component, Tensor]]:
        """What this rank holds now, by component, to be counted by storage. Not collective."""
        ...


def unobserved(micro_batches: Sequence[TokenBatch]) -> None:
    """Nobody looks."""


class Writing(Protocol):
    """What one rank has still to write of a checkpoint."""

    def write(self) -> None:
        """In any thread, with no collective."""
        ...

    def finish(self) -> None:
        """Collective, once every rank has written."""
        ...


class TrainEngine(Scorer, Protocol):
    before_step: Callable[[Sequence[TokenBatch]], None]
    """Called in ``train_step`` when the gradients are whole, with its micro-batches; ``unobserved`` unless set."""

    def train_step(self, micro_batches: Sequence[TokenBatch], totals: Totals, loss_fn: LossFn) -> Sums:
        """Forward and backward over ``micro_batches``, then exactly one optimizer step.

        Where a loss or the gradient of any rank is no finite number the step is skipped on all of them: weights,
        optimizer and learning rate stay as they are.

        Returns:
            The loss function's metrics summed over this rank's micro-batches, plus ``grad_norm`` (global, before
            clipping; no finite number when the step was skipped) and ``lr``.
        """
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under Hugging Face names, tied ones once; each is valid until the next is requested."""
        ...

    def save(self, directory: Path) -> None:
        """Write weights, optimizer and scheduler so that ``load`` continues bit-identically at this world size."""
        ...

    def snapshot(self, directory: Path) -> Writing:
        """Collective. Copy to host memory what ``save`` would write there, to be written later."""
        ...

    def load(self, directory: Path) -> None: ...


class ModuleEngine(TrainEngine, Protocol):
    """One whose model is a plain module, which may have an adapter."""

    module: nn.Module

    def full(self, stored: Iterable[Stored]) -> Iterator[tuple[str, Tensor]]:
        """Collective. Tensors computed of whole parameters; each is valid until the next is requested."""
        ...
