"""Losses of the tasks that learn from examples. Like all losses they divide by counts of the whole mini-batch (R3)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_mp.algorithms.aggregate import loss_aggregations
from rlhf_mp.algorithms.masked import PerSequence, masked
from rlhf_mp.config.dpo import DpoConfig
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.data.types import LossFn, PolicyOutput, RewardOutput, TokenBatch, Totals
from rlhf_mp.registry import Registry

PreferenceLoss = Callable[[Tensor, DpoConfig], Tensor]
"""(log-ratio of the chosen response minus that of the rejected one, per pair; settings) -> loss per pair."""

preference_losses: Registry[PreferenceLoss] = Registry("preference loss")


@dataclass(frozen=True)
class Task:
    """The loss, and how scores without gradient are made an output for the same loss."""

    loss: LossFn
    output: Callable[[Tensor], PolicyOutput | RewardOutput]
    needs_reference: bool = False


def make_task(config: RunConfig) -> Task:
    """``trainer.task`` of a run without reinforcement learning."""
    match config.trainer.task:
        case "sft":
            return Task(fine_tuning_loss(config.actor_rollout_ref.actor.loss_agg_mode), policy_of)
        case "dpo":
            return Task(dpo_loss(config.dpo), policy_of, needs_reference=True)
        case "reward_model":
            return Task(bradley_terry_loss, RewardOutput)
    raise ValueError(f"{config.trainer.task} learns from samples, not from examples")


def policy_of(logprobs: Tensor) -> PolicyOutput:
    return PolicyOutput(logprobs, entropy=torch.zeros_like(logprobs))


def fine_tuning_loss(loss_agg_mode: str) -> LossFn:
    """-log p of the tokens to be learned, aggregated as policy losses are."""
    aggregate = loss_aggregations[loss_agg_mode]

    def loss_fn(output: PolicyOutput, batch: TokenBatch, totals: Totals) -> tuple[Tensor, dict]:
        loss = aggregate(-output.logprobs, batch.mask, totals)
        return loss, {"loss": (loss.detach(), batch.mask.sum() / totals.num_tokens)}

    return loss_fn


def pairs(per_row: PerSequence) -> tuple[Tensor, Tensor]:
    """The chosen and the rejected rows' values, [P] each: rows come in pairs, the chosen one first.

    The single row of an empty micro-batch is half a pair: it makes none, but stays in the graph.
    """
    return per_row[: len(per_row) // 2 * 2].view(-1, 2).unbind(1)


def sequence_logprobs(logprobs: Tensor, mask: Tensor) -> PerSequence:
    return masked(logprobs, mask).sum(-1)


@preference_losses.register("sigmoid")
def sigmoid_loss(difference: Tensor, dpo: DpoConfig) -> Tensor:
    """Source: DPO, arXiv:2305.18290 eq. 7; label smoothing, conservative DPO (ericmitchell.ai/cdpo.pdf) eq. 3."""
    right, wrong = logsigmoid(dpo.beta * difference), logsigmoid(-dpo.beta * difference)
    return -(1 - dpo.label_smoothing) * right - dpo.label_smoothing * wrong


@preference_losses.register("ipo")
def ipo_loss(difference: Tensor, dpo: DpoConfig) -> Tensor:
    """The squared distance to 1 / (2 beta), beta being the paper's tau. Source: IPO, arXiv:2310.12036 eq. 17."""
    return (difference - 1 / (2 * dpo.beta)).square()


def dpo_loss(dpo: DpoConfig) -> LossFn:
    """A preference loss on how much more than the reference the policy likes the chosen response.

    Needs ``batch.ref_logprobs``. The metrics' rewards are DPO's implicit ones, beta * log(policy / reference).
    """
    per_pair = preference_losses[dpo.loss_type]

    def loss_fn(output: PolicyOutput, batch: TokenBatch, totals: Totals) -> tuple[Tensor, dict]:
        own, reference = (sequence_logprobs(x, batch.mask) for x in (output.logprobs, batch.ref_logprobs))
        chosen, rejected = pairs(own - reference)
        loss = per_pair(chosen - rejected, dpo).sum() / num_pairs(totals)
        implicit = {"chosen_reward": dpo.beta * chosen.detach(), "rejected_reward": dpo.beta * rejected.detach()}
        return loss, pair_metrics(loss, chosen, rejected, totals) | means(implicit)

    return loss_fn


def bradley_terry_loss(output: RewardOutput, batch: TokenBatch, totals: Totals) -> tuple[Tensor, dict]:
    """-log p(the chosen response wins), which its margin makes harder.

    Source: InstructGPT, arXiv:2203.02155 eq. 1; margin, Llama 2, arXiv:2307.09288 eq. 2.
    """
    chosen, rejected = pairs(output.rewards)
    margin, _ = pairs(batch.rewards)
    loss = -logsigmoid(chosen - rejected - margin).sum() / num_pairs(totals)
    found = {"chosen_reward": chosen.detach(), "rejected_reward": rejected.detach()}
    return loss, pair_metrics(loss, chosen, rejected, totals) | means(found)


def num_pairs(totals: Totals) -> int:
    return totals.num_sequences // 2


def pair_metrics(loss: Tensor, chosen: Tensor, rejected: Tensor, totals: Totals) -> dict[str, tuple[Tensor, Tensor]]:
    """The loss, and how often the chosen response is the better one; a tie is half right."""
    count = torch.tensor(float(len(chosen)), device=chosen.device)
    difference = (chosen - rejected).detach()
    right = (difference > 0).sum() + 0.5 * (difference == 0).sum()
    return {"loss": (loss.detach(), count / num_pairs(totals)), "accuracy": (right, count)}


def means(per_pair: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (x.sum(), torch.tensor(float(len(x)), device=x.device)) for name, x in per_pair.items()}
