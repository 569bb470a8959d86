"""What a critic is trained with, and how good its values are."""

from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_mp.algorithms.aggregate import loss_aggregations
from rlhf_mp.algorithms.masked import PerToken, masked, masked_sum
from rlhf_mp.config.schema import CriticConfig
from rlhf_mp.data.types import LossFn, Sums, TokenBatch, Totals, ValueOutput


def clipped_value_loss(
    values: PerToken, old_values: PerToken, returns: PerToken, clip: float
) -> tuple[PerToken, PerToken]:
    """Half the squared error; its gradient ends where an update has moved a value further than ``clip``.

    Returns:
        (loss, 1 where the clip decided it)

    Source: PPO, arXiv:1707.06347 eq. 9 (the squared error); the clip is that of its authors' code, as in
    arXiv:2005.12729 sec. 3 and arXiv:2006.05990 (choice C13).
    """
    free = (values - returns).square()
    near = old_values + (values - old_values).clamp(-clip, clip)
    bounded = (near - returns).square()
    return torch.maximum(free, bounded) / 2, (bounded > free).to(free.dtype)


def make_value_loss(critic: CriticConfig) -> LossFn:
    """The critic's loss, which needs ``batch.values`` from before the step's first update, and ``batch.returns``."""
    aggregate = loss_aggregations[critic.loss_agg_mode]

    def loss_fn(output: ValueOutput, batch: TokenBatch, totals: Totals):
        mask = batch.mask
        # Zeroed here, not only in the sums: see make_policy_loss.
        values, old, returns = (masked(x, mask) for x in (output.values, batch.values, batch.returns))
        per_token, clipped = clipped_value_loss(values, old, returns, critic.cliprange_value)
        loss = aggregate(per_token, mask, totals)
        num_tokens = mask.sum()
        return loss, {
            "loss": (loss.detach(), num_tokens / totals.num_tokens),
            "clip_fraction": (masked_sum(clipped, mask), num_tokens),
        }

    return loss_fn


def value_metrics(batch: TokenBatch, sum_over_ranks: Callable[[Tensor], Tensor]) -> Sums:
    """The critic's values and what they should have been, over the tokens of all ranks.

    ``explained_variance`` is 1 - Var(return - value) / Var(return): 1 for a perfect critic, 0 for a constant one,
    below 0 for one that is worse than none; left out where all returns are equal.

    Args:
        sum_over_ranks: collective. Ranks with the same data may all take part: nothing but ratios is used.
    """
    columns = torch.stack([batch.values, batch.returns, batch.returns - batch.values]).double()
    columns = columns[:, batch.mask > 0]  # [3 N]
    count, *sums = sum_over_ranks(torch.cat([torch.tensor([float(columns.shape[1])]).double(), columns.sum(1)]))
    mean = torch.stack(sums) / count.clamp(min=1)
    variance = sum_over_ranks((columns - mean[:, None]).square().sum(1)) / count.clamp(min=1)
    std = variance.sqrt().tolist()
    metrics = {
        "value_mean": (mean[0].item(), 1.0),
        "value_std": (std[0], 1.0),
        "return_mean": (mean[1].item(), 1.0),
        "return_std": (std[1], 1.0),
    }
    if std[1] > 0:
        metrics["explained_variance"] = (1 - variance[2].item() / variance[1].item(), 1.0)
    return metrics
