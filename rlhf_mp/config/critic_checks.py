"""Rules of the critic: when there is one, and what it needs beside the rules of every trained model."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields

from rlhf_mp.config.algorithm import ESTIMATORS
from rlhf_mp.config.derive import derive, has_critic, needs_critic
from rlhf_mp.config.schema import CriticConfig, ModelConfig, RunConfig
from rlhf_mp.errors import Problem


def written_problems(config: RunConfig) -> Iterator[Problem]:
    """Knobs of a critic that nobody trains."""
    if has_critic(config):
        return
    estimator = config.algorithm.adv_estimator
    reason = f"no effect: algorithm.adv_estimator={estimator} needs no critic"
    written, untouched = deepcopy(config), deepcopy(config)
    untouched.critic = CriticConfig(enable=config.critic.enable)
    for filled_in in (written, untouched):  # a resolved config says what an untouched one becomes
        derive(filled_in)
    for f in fields(CriticConfig):
        value = getattr(written.critic, f.name)
        if value != getattr(untouched.critic, f.name):
            yield Problem(f"critic.{f.name}", getattr(config.critic, f.name), reason, f"remove it, or {GAE}")
    if config.trainer.critic_warmup:
        yield Problem(WARMUP, config.trainer.critic_warmup, reason, f"{WARMUP}=0, or {GAE}")


GAE, WARMUP = "algorithm.adv_estimator=gae", "trainer.critic_warmup"


def critic_problems(config: RunConfig) -> Iterator[Problem]:
    """What a critic needs, once knobs that follow from others are filled in."""
    critic, trainer = config.critic, config.trainer
    if critic.enable and not needs_critic(config) and config.algorithm.adv_estimator in ESTIMATORS:
        yield Problem(
            "critic.enable",
            True,
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} never looks at its values",
            f"critic.enable=false, or {GAE}",
        )
    if not critic.enable:
        return
    own, actors = critic.model, config.actor_rollout_ref.model
    if own.use_remove_padding != actors.use_remove_padding:
        yield Problem(
            "critic.model.use_remove_padding",
            own.use_remove_padding,
            f"actor_rollout_ref.model.use_remove_padding = {actors.use_remove_padding}; a job packs all or none",
            "remove it",
        )
    if own.logits_chunk_mb != ModelConfig().logits_chunk_mb:
        yield Problem(
            "critic.model.logits_chunk_mb", own.logits_chunk_mb, "no effect: a critic has no logits", "remove it"
        )
    longest = config.data.max_prompt_length + config.data.max_response_length
    if config.actor_rollout_ref.actor.use_dynamic_bsz:
        for name in ("ppo_max_token_len_per_gpu", "forward_max_token_len_per_gpu"):
            if getattr(critic, name) < longest:
                yield Problem(
                    f"critic.{name}",
                    getattr(critic, name),
                    f"one sequence may be longer: data.max_prompt_length + data.max_response_length = {longest}",
                    f"critic.{name}={longest}, or shorter sequences",
                )
    if trainer.total_training_steps is not None and trainer.critic_warmup >= trainer.total_training_steps:
        yield Problem(
            WARMUP,
            trainer.critic_warmup,
            f"the policy would never be trained: trainer.total_training_steps = {trainer.total_training_steps}",
            f"{WARMUP}={trainer.total_training_steps // 10}",
        )
