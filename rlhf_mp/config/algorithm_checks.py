"""Rules of algorithms: what they need, what would have no effect, what can never work."""

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any

from rlhf_mp.config.algorithm import CLIP, ESTIMATORS, POLICY_LOSSES, SEQUENCE_LEVEL, Needs, needs_of
from rlhf_mp.config.derive import default_correction
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.errors import Problem

ACTOR, ROLLOUT, CORRECTION = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"
KL, FILTER, OVERLONG = "algorithm.kl_ctrl", "algorithm.filter_groups", "reward.overlong_buffer"


def written_problems(config: RunConfig) -> Iterator[Problem]:
    """Knobs that somebody changed and that change nothing. One's own functions may read any."""
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    if algorithm.adv_estimator in ESTIMATORS:
        readers = {name: needs.reads for name, needs in ESTIMATORS.items()}
        yield from _unread(config, "algorithm", readers, algorithm.adv_estimator, "adv_estimator")
    if actor.policy_loss in POLICY_LOSSES:
        yield from _unread(config, ACTOR, POLICY_LOSSES, actor.policy_loss, "policy_loss")
    kl, method = algorithm.use_kl_in_reward, algorithm.rollout_correction.method or default_correction(config)
    adaptive = algorithm.kl_ctrl.type == "adaptive"
    conditions = (
        ("algorithm.kl_penalty", kl, "algorithm.use_kl_in_reward=true"),
        (f"{KL}.type", kl, "algorithm.use_kl_in_reward=true"),
        (f"{KL}.kl_coef", kl, "algorithm.use_kl_in_reward=true"),
        (f"{KL}.horizon", kl and adaptive, f"algorithm.use_kl_in_reward=true {KL}.type=adaptive"),
        (f"{KL}.target_kl", kl and adaptive, f"algorithm.use_kl_in_reward=true {KL}.type=adaptive"),
        (f"{CORRECTION}.level", method != "none", f"{CORRECTION}.method=tis"),
        (f"{CORRECTION}.threshold", method != "none", f"{CORRECTION}.method=tis"),
        (f"{CORRECTION}.threshold_low", method == "icepop", f"{CORRECTION}.method=icepop"),
        (f"{FILTER}.max_num_gen_batches", algorithm.filter_groups.enable, f"{FILTER}.enable=true"),
        (f"{OVERLONG}.len", config.reward.overlong_buffer.enable, f"{OVERLONG}.enable=true"),
        (f"{OVERLONG}.penalty_factor", config.reward.overlong_buffer.enable, f"{OVERLONG}.enable=true"),
    )
    for key, has_effect, switch in conditions:
        if not has_effect and _value(config, key) != _value(RunConfig(), key):
            yield Problem(key, _value(config, key), f"no effect without {switch}", f"{switch}, or remove it")


def _unread(
    config: RunConfig, section: str, readers: Mapping[str, tuple[str, ...]], chosen: str, knob: str
) -> Iterator[Problem]:
    """Changed knobs that others of the registered functions read, but not the chosen one."""
    for name in sorted({name for names in readers.values() for name in names} - {*readers[chosen]}):
        key = f"{section}.{name}"
        follows = {_value(RunConfig(), key)} | (
            {config.actor_rollout_ref.actor.clip_ratio} if name in CLIP[1:] else set()
        )
        if _value(config, key) not in follows:
            using = [reader for reader, names in readers.items() if name in names]
            yield Problem(
                key,
                _value(config, key),
                f"no effect with {section}.{knob}={chosen}; it is read by {', '.join(using)}",
                f"remove it, or {section}.{knob}={using[0]}",
            )


def _value(config: RunConfig, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def algorithm_problems(config: RunConfig) -> Iterator[Problem]:
    """What an algorithm needs and does not get, or can never do."""
    yield from unmet_needs(config, needs_of(config.algorithm.adv_estimator))
    yield from _kl_problems(config)
    yield from _loss_problems(config)
    yield from _correction_problems(config)
    yield from _sampling_problems(config)


def unmet_needs(config: RunConfig, needs: Needs) -> Iterator[Problem]:
    """Of the estimator; of one's own they are known at start-up."""
    estimator, rollout = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout
    if rollout.n < needs.min_responses:
        yield Problem(
            f"{ROLLOUT}.n",
            rollout.n,
            f"{estimator} compares the responses to one prompt; a single one has advantage 0",
            f"{ROLLOUT}.n=8, or algorithm.adv_estimator=reinforce_plus_plus",
        )
    if needs.critic and not config.critic.enable:
        yield Problem(
            "algorithm.adv_estimator",
            estimator,
            f"needs the values of a critic, and critic.enable={str(config.critic.enable).lower()}",
            "critic.enable=true, or algorithm.adv_estimator=grpo",
        )


def _kl_problems(config: RunConfig) -> Iterator[Problem]:
    algorithm = config.algorithm
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef == 0:
        reason = "adaptive control multiplies it, so it stays 0"
        if algorithm.kl_ctrl.type == "fixed":
            reason = "a reference model would be held and run for a penalty of weight 0"
        yield Problem(f"{KL}.kl_coef", 0, reason, f"{KL}.kl_coef=0.001, or algorithm.use_kl_in_reward=false")


def _loss_problems(config: RunConfig) -> Iterator[Problem]:
    actor = config.actor_rollout_ref.actor
    if actor.policy_loss in SEQUENCE_LEVEL and actor.loss_agg_mode != "seq-mean-token-mean":
        yield Problem(
            f"{ACTOR}.loss_agg_mode",
            actor.loss_agg_mode,
            f"{actor.policy_loss} is an objective of whole responses, in which each weighs the same",
            f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
        )
    if actor.policy_loss == "kl_cov" and config.updates_per_step == 1:
        yield Problem(
            f"{ACTOR}.policy_loss",
            actor.policy_loss,
            "holds tokens back near the old policy, and with one update per step the policy is still the old one",
            f"{ACTOR}.policy_loss=clip_cov, or a smaller {ACTOR}.ppo_mini_batch_size",
        )
    if actor.policy_loss == "clip_cov" and actor.clip_cov_lb >= actor.clip_cov_ub:
        yield Problem(
            f"{ACTOR}.clip_cov_lb",
            actor.clip_cov_lb,
            f"no covariance is above it and below {ACTOR}.clip_cov_ub = {actor.clip_cov_ub}",
            f"{ACTOR}.clip_cov_lb=1.0 {ACTOR}.clip_cov_ub=5.0",
        )


def _correction_problems(config: RunConfig) -> Iterator[Problem]:
    rollout, method = config.actor_rollout_ref.rollout, config.algorithm.rollout_correction.method
    if method == "none":
        return
    without = f"{ROLLOUT}.max_staleness=0" if rollout.max_staleness > 0 else f"{CORRECTION}.method=none"
    for name, value, whole in (("top_p", rollout.top_p, 1.0), ("top_k", rollout.top_k, -1)):
        if value != whole:
            yield Problem(
                f"{CORRECTION}.method",
                method,
                f"with {ROLLOUT}.{name} = {value} tokens are drawn from a cut distribution, of which neither the "
                "engine's nor the trainer's log-probs are",
                f"{ROLLOUT}.{name}={whole:g}, or {without}",
            )


def _sampling_problems(config: RunConfig) -> Iterator[Problem]:
    rollout, overlong = config.actor_rollout_ref.rollout, config.reward.overlong_buffer
    if config.algorithm.filter_groups.enable and rollout.n < 2:
        yield Problem(
            f"{FILTER}.enable",
            True,
            f"a group of {ROLLOUT}.n = {rollout.n} has no spread, so no batch is ever full",
            f"{ROLLOUT}.n=8, or {FILTER}.enable=false",
        )
    if overlong.enable and overlong.len > config.data.max_response_length:
        yield Problem(
            f"{OVERLONG}.len",
            overlong.len,
            f"longer than data.max_response_length = {config.data.max_response_length}, so every response is punished",
            f"{OVERLONG}.len={max(1, config.data.max_response_length // 4)}",
        )
