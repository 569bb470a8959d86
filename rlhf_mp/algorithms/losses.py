"""The one loss function the actor is trained with."""

import torch
from torch import Tensor

from rlhf_mp.algorithms.aggregate import loss_aggregations
from rlhf_mp.algorithms.correction import CORRECTIONS, mismatch_metrics, rollout_weights
from rlhf_mp.algorithms.kl import k3, kl_estimators, log_ratio
from rlhf_mp.algorithms.masked import PerToken, masked, masked_sum
from rlhf_mp.algorithms.registered import policy_losses
from rlhf_mp.config.algorithm import RolloutCorrectionConfig
from rlhf_mp.config.schema import ActorConfig
from rlhf_mp.data.types import LossFn, PolicyOutput, TokenBatch, Totals

NO_CORRECTION = RolloutCorrectionConfig()


def make_policy_loss(actor: ActorConfig, correction: RolloutCorrectionConfig = NO_CORRECTION) -> LossFn:
    """The actor's loss: policy loss - entropy_coeff * entropy + kl_loss_coef * KL(policy || reference).

    Without ``batch.old_logprobs`` the step has a single update, so the current policy is the old one. The KL term
    needs ``batch.ref_logprobs``. Metrics per token count tokens; losses count this micro-batch's share of the
    mini-batch, so that sum / count over ranks, micro-batches and mini-batches is the mean loss of a mini-batch.
    """
    policy_loss = policy_losses.find(actor.policy_loss)
    aggregate = loss_aggregations[actor.loss_agg_mode]
    estimate_kl = kl_estimators[actor.kl_loss_type]

    def loss_fn(output: PolicyOutput, batch: TokenBatch, totals: Totals):
        mask = batch.mask
        # Log-probs off the mask can be anything. They are zeroed here, not only in the sums: a gradient of 0 that goes
        # back through a function whose value is inf or nan becomes nan.
        logprobs, rollout = masked(output.logprobs, mask), masked(batch.rollout_logprobs, mask)
        old = logprobs.detach() if batch.old_logprobs is None else masked(batch.old_logprobs, mask)
        terms = policy_loss(logprobs, batch.with_old_logprobs(old), actor)
        per_token, per_token_metrics = terms.loss, dict(terms.metrics)
        if correction.method in CORRECTIONS:
            weights, about_weights = rollout_weights(old, rollout, correction)
            per_token, per_token_metrics = per_token * weights, per_token_metrics | about_weights
        pg_loss = loss = aggregate(per_token, mask, totals)
        if actor.entropy_coeff:
            loss = loss - actor.entropy_coeff * aggregate(output.entropy, mask, totals)
        per_token_metrics |= policy_metrics(logprobs.detach(), old) | mismatch_metrics(old, rollout)
        per_token_metrics["entropy"] = output.entropy.detach()
        if actor.use_kl_loss:
            kl = estimate_kl(logprobs, masked(batch.ref_logprobs, mask))
            loss = loss + actor.kl_loss_coef * aggregate(kl, mask, totals)
            per_token_metrics["kl_to_reference"] = kl.detach()

        num_tokens = mask.sum()
        share = num_tokens / totals.num_tokens
        metrics = {name: (masked_sum(x, mask), num_tokens) for name, x in per_token_metrics.items()}
        metrics |= {
            "ratio_max": largest(logprobs.detach(), old, mask),
            "rollout_ratio_max": largest(old, rollout, mask),
        }
        return loss, metrics | {"loss": (loss.detach(), share), "pg_loss": (pg_loss.detach(), share)}

    return loss_fn


def policy_metrics(logprobs: PerToken, old: PerToken) -> dict[str, PerToken]:
    """How far the policy moved since the old one, which the tokens are taken to be drawn from."""
    return {"approx_kl": k3(old, logprobs), "ratio_mean": log_ratio(logprobs, old).exp()}


def largest(numerator: PerToken, denominator: PerToken, mask: PerToken) -> tuple[Tensor, Tensor]:
    """The largest ratio of chosen tokens, and 1, or 0 if there are none."""
    ratio = torch.where(mask > 0, log_ratio(numerator, denominator).exp(), 0.0)
    return ratio.max(), (mask > 0).any().to(ratio.dtype)
