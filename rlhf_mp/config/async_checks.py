"""Rules of engines beside the trainer: placement, staleness, over-sampling."""

from collections.abc import Iterator

from rlhf_mp.config.algorithm import POLICY_LOSSES, needs_of
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.errors import Problem

ROLLOUT, PLACEMENT = "actor_rollout_ref.rollout", "trainer.placement"
OFFLOAD = "trainer.offload_during_rollout"
CORRECTION = "algorithm.rollout_correction.method"


def async_problems(config: RunConfig) -> Iterator[Problem]:
    yield from _placement_problems(config)
    yield from _staleness_problems(config)
    rollout = config.actor_rollout_ref.rollout
    if rollout.over_sample_rate > 0 and needs_of(config.algorithm.adv_estimator).greedy_baseline:
        key = f"{ROLLOUT}.over_sample_rate"
        yield Problem(
            key,
            rollout.over_sample_rate,
            f"{config.algorithm.adv_estimator} also waits for a greedy response to every prompt, the aborted ones too",
            f"{key}=0, or algorithm.adv_estimator=rloo",
        )


def _placement_problems(config: RunConfig) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.placement == "colocated":
        if trainer.offload_during_rollout and config.actor_rollout_ref.rollout.free_cache_engine is False:
            reason = "engines that never sleep leave that memory to nobody else: it is needed again for training"
            yield Problem(OFFLOAD, True, reason, f"{OFFLOAD}=false, or {ROLLOUT}.free_cache_engine=true")
        return
    if trainer.offload_during_rollout:
        reason = f"with {PLACEMENT}=disjoint no engine needs the memory of a rank's GPU"
        yield Problem(OFFLOAD, True, reason, f"{OFFLOAD}=false")
    if config.actor_rollout_ref.rollout.free_cache_engine:
        key = f"{ROLLOUT}.free_cache_engine"
        yield Problem(key, True, f"with {PLACEMENT}=disjoint nobody else needs the memory of an engine", f"{key}=false")
    if config.actor_rollout_ref.weight_sync.transport == "tensor" and trainer.device != "cpu":
        key = "actor_rollout_ref.weight_sync.transport"
        yield Problem(
            key,
            "tensor",
            f"a handle is of one GPU's memory, and with {PLACEMENT}=disjoint no engine sees a rank's GPU",
            f"{key}=distributed",
        )


def _staleness_problems(config: RunConfig) -> Iterator[Problem]:
    staleness = config.actor_rollout_ref.rollout.max_staleness
    if staleness == 0:
        return
    if config.trainer.placement == "colocated":
        yield Problem(
            f"{ROLLOUT}.max_staleness",
            staleness,
            f"with {PLACEMENT}=colocated engines and ranks take turns, so nothing can be sampled ahead",
            f"{PLACEMENT}=disjoint, or {ROLLOUT}.max_staleness=0",
        )
    own_loss = config.actor_rollout_ref.actor.policy_loss not in POLICY_LOSSES  # it can weigh samples by itself
    if config.algorithm.rollout_correction.method == "none" and not own_loss:
        yield Problem(
            CORRECTION,
            "none",
            f"samples are up to {ROLLOUT}.max_staleness = {staleness} versions old, and the policy loss compares with "
            "the policy just before the update: nothing would notice their age",
            f"{CORRECTION}=tis, or {ROLLOUT}.max_staleness=0",
        )
