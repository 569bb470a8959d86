"""Policy losses per token, and the one loss function the actor is trained with."""

from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_mp.algorithms.aggregate import loss_aggregations
from rlhf_mp.algorithms.kl import k3, kl_estimators, log_ratio
from rlhf_mp.algorithms.masked import PerToken, masked, masked_sum
from rlhf_mp.config.schema import ActorConfig
from rlhf_mp.data.types import LossFn, PolicyOutput, TokenBatch, Totals
from rlhf_mp.registry import Registry

PolicyLoss = Callable[..., tuple[PerToken, PerToken]]
"""(log-probs, old log-probs, advantages, *, clip_low, clip_high) -> (loss, 1 where the clip decided it)."""

policy_losses: Registry[PolicyLoss] = Registry("policy loss")


@policy_losses.register("ppo_clip")
def ppo_clip(
    logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, *, clip_low: float, clip_high: float
) -> tuple[PerToken, PerToken]:
    """PPO's clipped surrogate: no gradient once the ratio has left [1 - clip_low, 1 + clip_high] in its own direction.

    Source: arXiv:1707.06347 eq. 7; separate upper bound ("clip-higher"), DAPO arXiv:2503.14476 eq. 10.
    """
    ratio = log_ratio(logprobs, old_logprobs).exp()
    free = -ratio * advantages
    bounded = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return torch.maximum(free, bounded), (bounded > free).to(free.dtype)


def make_policy_loss(actor: ActorConfig) -> LossFn:
    """The actor's loss: policy loss - entropy_coeff * entropy + kl_loss_coef * KL(policy || reference).

    Without ``batch.old_logprobs`` the step has a single update, so the current policy is the old one. The KL term
    needs ``batch.ref_logprobs``. Metrics per token count tokens; losses count this micro-batch's share of the
    mini-batch, so that sum / count over ranks, micro-batches and mini-batches is the mean loss of a mini-batch.
    """
    policy_loss = policy_losses[actor.policy_loss]
    aggregate = loss_aggregations[actor.loss_agg_mode]
    estimate_kl = kl_estimators[actor.kl_loss_type]

    def loss_fn(output: PolicyOutput, batch: TokenBatch, totals: Totals):
        mask = batch.mask
        # Log-probs off the mask can be anything. They are zeroed here, not only in the sums: a gradient of 0 that goes
        # back through a function whose value is inf or nan becomes nan.
        logprobs = masked(output.logprobs, mask)
        old = logprobs.detach() if batch.old_logprobs is None else masked(batch.old_logprobs, mask)
        per_token, clipped = policy_loss(
            logprobs, old, batch.advantages, clip_low=actor.clip_ratio_low, clip_high=actor.clip_ratio_high
        )
        pg_loss = loss = aggregate(per_token, mask, totals)
        if actor.entropy_coeff:
            loss = loss - actor.entropy_coeff * aggregate(output.entropy, mask, totals)
        per_token_metrics = policy_metrics(logprobs.detach(), old, masked(batch.rollout_logprobs, mask))
        per_token_metrics |= {"entropy": output.entropy.detach(), "clip_fraction": clipped}
        if actor.use_kl_loss:
            kl = estimate_kl(logprobs, masked(batch.ref_logprobs, mask))
            loss = loss + actor.kl_loss_coef * aggregate(kl, mask, totals)
            per_token_metrics["kl_to_reference"] = kl.detach()

        num_tokens = mask.sum()
        share = num_tokens / totals.num_tokens
        metrics = {name: (masked_sum(x, mask), num_tokens) for name, x in per_token_metrics.items()}
        return loss, metrics | {"loss": (loss.detach(), share), "pg_loss": (pg_loss.detach(), share)}

    return loss_fn


def policy_metrics(logprobs: PerToken, old: PerToken, rollout: PerToken) -> dict[str, Tensor]:
    """How far the policy moved since the old one, and how far the engine that sampled is from the trainer."""
    return {
        "approx_kl": k3(old, logprobs),  # of KL(old || policy): old is what the tokens are taken to be drawn from
        "rollout_logprob_difference": (rollout - old).abs(),
        "rollout_kl": k3(rollout, old),
    }
