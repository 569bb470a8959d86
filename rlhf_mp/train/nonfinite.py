"""Where a number that is none comes from: rows and tokens of a batch, told by what a loss function sees.

Works on any backend, as it needs no more than to stand in for the loss: inputs, outputs of the model, the loss of
each row and of each token alone, and the gradient that goes back into the model are looked at in this order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from rlhf_mp.data.types import LossFn, Output, TokenBatch, Totals

MODEL = "what the model computed"
LOSS = "the loss"
GRADIENT = "the gradient of the loss"


@dataclass(frozen=True)
class Finding:
    """One row with something that is no finite number."""

    what: str  # a field of the batch, or one of the names above
    row: int  # of the micro-batch, or with ``Search.found`` of the share
    tokens: list[int]  # positions in the row; empty where it is the row as a whole


@dataclass
class Search:
    """One update's loss function, looked through while a backend runs it.

    Args:
        cut: rows of the share that each micro-batch has, in the order in which the loss is called.
        together: rows that a loss needs at once: 2 where they are pairs.
    """

    loss_fn: LossFn
    cut: Sequence[list[int]]
    together: int = 1
    found: list[Finding] = field(default_factory=list)
    calls: int = field(default=0, init=False)

    def __call__(self, output: Output, batch: TokenBatch, totals: Totals) -> tuple[Tensor, dict]:
        rows = self.cut[self.calls] if self.calls < len(self.cut) else []  # a pipeline fills up with empty ones
        self.calls += 1
        if rows:
            findings = findings_of(self.loss_fn, output, batch, totals, self.together)
            self.found += [replace(finding, row=rows[finding.row]) for finding in findings]
        return self.loss_fn(output, batch, totals)


def findings_of(
    loss_fn: LossFn, output: Output, batch: TokenBatch, totals: Totals, together: int = 1
) -> Iterator[Finding]:
    """Everything in one micro-batch that is no finite number, causes before what follows from them."""
    for f in fields(batch):
        values = getattr(batch, f.name)
        if values is not None and values.is_floating_point():
            yield from _rows(f.name, values, batch.mask)
    leaves = {f.name: getattr(output, f.name).detach().requires_grad_() for f in fields(output)}
    for values in leaves.values():
        yield from _rows(MODEL, values.detach(), batch.mask)
    for first in range(0, len(batch.tokens) // together * together, together):
        yield from _in_loss(loss_fn, type(output), leaves, batch, totals, [*range(first, first + together)])


def _rows(what: str, values: Tensor, mask: Tensor) -> Iterator[Finding]:
    """Of a tensor [B T], where the mask says that it counts, or [B]."""
    if values.dim() == 1:
        yield from (Finding(what, row, []) for row in (~values.isfinite()).nonzero().flatten().tolist())
        return
    bad = ~values.isfinite() & (mask > 0)
    yield from (
        Finding(what, row, bad[row].nonzero().flatten().tolist()) for row in bad.any(1).nonzero()[:, 0].tolist()
    )


def _in_loss(
    loss_fn: LossFn, kind: type, leaves: dict[str, Tensor], batch: TokenBatch, totals: Totals, rows: list[int]
) -> Iterator[Finding]:
    """Of a few rows alone, and token by token where those are not finite."""
    own = {name: x[rows].detach().requires_grad_() for name, x in leaves.items()}
    part = batch.select([*rows])
    width = part.tokens.shape[1]
    own = {name: x[:, :width].detach().requires_grad_() if x.dim() == 2 else x for name, x in own.items()}

    def loss_of(mask: Tensor) -> Tensor:
        with torch.enable_grad():
            return loss_fn(kind(**own), replace(part, mask=mask), totals)[0]

    whole, alone = loss_of(part.mask), torch.zeros_like(part.mask)
    if not whole.isfinite():
        spoiled_by_none = not loss_of(alone).isfinite()  # then no single token is to blame
        for i, row in enumerate(rows):
            tokens = []
            for t in [] if spoiled_by_none else part.mask[i].nonzero().flatten().tolist():
                alone = torch.zeros_like(part.mask)
                alone[i, t] = 1
                tokens += [t] * (not loss_of(alone).isfinite())
            yield Finding(LOSS, row, tokens)
        return
    if not whole.requires_grad:
        return
    gradients = torch.autograd.grad(whole, [*own.values()], allow_unused=True)
    for gradient in gradients:
        if gradient is not None:
            for finding in _rows(GRADIENT, gradient, torch.ones_like(part.mask)):
                yield replace(finding, row=rows[finding.row])
