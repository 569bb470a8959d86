"""Functions of one's own are tried on a tiny batch at start-up, instead of failing after the first rollout."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from rlhf_mp.algorithms.advantages import Estimate, Estimator
from rlhf_mp.algorithms.policy_loss import PolicyLoss, PolicyTerms
from rlhf_mp.algorithms.registered import advantage_estimators, policy_losses
from rlhf_mp.algorithms.token_advantages import on_last_token
from rlhf_mp.config.algorithm import ESTIMATORS, Needs
from rlhf_mp.config.algorithm_checks import unmet_needs
from rlhf_mp.config.schema import ActorConfig, RunConfig
from rlhf_mp.data.types import TokenBatch
from rlhf_mp.errors import ConfigError, Problem
from rlhf_mp.registry import ImportProblem, Registry

ESTIMATOR, POLICY_LOSS = "algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss"
FIX = "docs/algorithms.md, section 'Your own', says what it gets and gives"


def tiny_batch() -> TokenBatch:
    """Two prompts with two responses each: one interrupted by tool output, one empty, and rewards that are equal."""
    mask = torch.tensor([[0, 1, 1, 1, 0], [0, 1, 0, 1, 1], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]]).float()
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.5])
    logprobs = -torch.linspace(0.1, 2.0, 20).view(4, 5) * mask
    return TokenBatch(
        tokens=torch.arange(20).view(4, 5),
        mask=mask,
        rewards=rewards,
        group_ids=torch.tensor([3, 3, 5, 5]),
        lengths=torch.tensor([4, 5, 3, 1]),
        rollout_logprobs=logprobs,
        old_logprobs=logprobs * 1.01,
        ref_logprobs=logprobs * 0.9,
        values=torch.linspace(-1.0, 1.0, 20).view(4, 5) * mask,
        baselines=torch.tensor([0.5, 0.5, 0.0, 0.0]),
        token_rewards=on_last_token(rewards, mask),
        advantages=(rewards - 0.4)[:, None] * mask,
        returns=rewards[:, None] * mask,
        selected=torch.zeros_like(mask),
    )


def checked_estimator(config: RunConfig) -> tuple[Estimator, Needs]:
    """The chosen estimator and what it needs.

    Raises:
        ConfigError: it cannot be found, does not keep the contract, or needs what this run has not.
    """
    name, batch = config.algorithm.adv_estimator, tiny_batch()
    estimator = _find(advantage_estimators, name, ESTIMATOR)
    if name in ESTIMATORS:
        return estimator, ESTIMATORS[name]
    found = _tried(estimator, (batch, config.algorithm), name, ESTIMATOR, Estimate)
    for field in ("advantages", "returns"):
        value = getattr(found, field)
        if field == "advantages" or value is not None:
            _require_per_token(value, batch, name, ESTIMATOR, field)
    needs = getattr(estimator, "needs", Needs())
    if not isinstance(needs, Needs):
        raise _broken(ESTIMATOR, name, f"its attribute needs is {needs!r}, not a Needs of rlhf_mp.config.algorithm")
    if config.critic.enable and found.returns is None:
        raise _broken(ESTIMATOR, name, "it gives no returns, and a critic is trained towards them (critic.enable)")
    if problems := list(unmet_needs(config, needs)):
        raise ConfigError(problems)
    return estimator, needs


def checked_policy_loss(actor: ActorConfig) -> PolicyLoss:
    """The chosen policy loss.

    Raises:
        ConfigError: it cannot be found or does not keep the contract.
    """
    name, batch = actor.policy_loss, tiny_batch()
    loss = _find(policy_losses, name, POLICY_LOSS)
    if name in policy_losses:
        return loss
    logprobs = (batch.old_logprobs * 1.02).requires_grad_()
    found = _tried(loss, (logprobs, batch, actor), name, POLICY_LOSS, PolicyTerms)
    _require_per_token(found.loss, batch, name, POLICY_LOSS, "loss")
    for metric, value in found.metrics.items():
        _require_per_token(value, batch, name, POLICY_LOSS, f"metric {metric}")
    if not found.loss.requires_grad:
        raise _broken(POLICY_LOSS, name, "its loss has no gradient: nothing would be learned")
    return loss


def _find(registry: Registry, name: str, key: str) -> Any:
    try:
        return registry.find(name)
    except ImportProblem as error:
        raise ConfigError([Problem(key, name, str(error), error.fix)]) from error


def _tried(function: Callable, arguments: tuple, name: str, key: str, kind: type) -> Any:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise _broken(key, name, f"it is called with {len(arguments)} arguments: {error}") from error
    try:
        found = function(*arguments)
    except Exception as error:
        raise _broken(key, name, f"on a batch of four responses it raises {type(error).__name__}: {error}") from error
    if not isinstance(found, kind):
        raise _broken(key, name, f"it returns {type(found).__name__}, not {kind.__name__} of {kind.__module__}")
    return found


def _require_per_token(value: Any, batch: TokenBatch, name: str, key: str, what: str) -> None:
    if not isinstance(value, torch.Tensor) or value.shape != batch.mask.shape or not value.is_floating_point():
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise _broken(key, name, f"its {what} is {shape}, not a float tensor of the mask's shape [B T]")
    if not value[batch.mask > 0].isfinite().all():
        raise _broken(key, name, f"its {what} is not finite on a batch with an empty response and equal rewards")


def _broken(key: str, name: str, reason: str) -> ConfigError:
    return ConfigError([Problem(key, name, reason, FIX)])
