"""How per-token losses become one number.

Every mode divides by counts of the whole mini-batch over all ranks, which come from outside. The parts of all
micro-batches on all ranks therefore add up to the loss of the mini-batch, however it was cut.
"""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from rlhf_mp.algorithms.masked import PerToken, masked, masked_sum
from rlhf_mp.data.types import Totals
from rlhf_mp.registry import Registry

Aggregation = Callable[[PerToken, PerToken, Totals], Float[Tensor, ""]]
"""(per token, mask, counts of the mini-batch) -> this micro-batch's part."""

loss_aggregations: Registry[Aggregation] = Registry("loss aggregation")


@loss_aggregations.register("token-mean")
def token_mean(per_token: PerToken, mask: PerToken, totals: Totals) -> Float[Tensor, ""]:
    """Every token weighs the same.

    Source: DAPO, arXiv:2503.14476 eq. 12, which counts the tokens of a group; here, as in its authors' code, those of
    the mini-batch.
    """
    return masked_sum(per_token, mask) / totals.num_tokens


@loss_aggregations.register("seq-mean-token-sum")
def sequence_mean_token_sum(per_token: PerToken, mask: PerToken, totals: Totals) -> Float[Tensor, ""]:
    """Mean over sequences of their sums. Source: Dr. GRPO, arXiv:2503.20783 sec. 3.2."""
    return masked_sum(per_token, mask) / totals.num_sequences


@loss_aggregations.register("seq-mean-token-mean")
def sequence_mean_token_mean(per_token: PerToken, mask: PerToken, totals: Totals) -> Float[Tensor, ""]:
    """Every sequence weighs the same; one in which no token counts adds 0. Source: GRPO, arXiv:2402.03300 eq. 3."""
    means = masked(per_token, mask).sum(-1) / mask.sum(-1).clamp(min=1)
    return means.sum() / totals.num_sequences
