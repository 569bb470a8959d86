"""Sums over the tokens that count. ``PerToken`` tensors are aligned as in ``rlhf_mp.data.types``."""

import torch
from jaxtyping import Float
from torch import Tensor

PerToken = Float[Tensor, "B T"]
PerSequence = Float[Tensor, "B"]


def masked(x: PerToken, mask: PerToken) -> PerToken:
    """``x`` where ``mask`` is 1, else 0, whatever ``x`` is there: unlike ``x * mask``, inf and nan become 0 too."""
    return torch.where(mask > 0, x, 0.0)


def masked_sum(x: PerToken, mask: PerToken) -> Float[Tensor, ""]:
    return masked(x, mask).sum()
