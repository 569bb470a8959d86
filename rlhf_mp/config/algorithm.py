"""What turns rewards into updates: its knobs, and what each algorithm needs, known before torch is imported."""

from dataclasses import dataclass
from typing import Literal

from rlhf_mp.config.knob import knob, section


@dataclass(frozen=True)
class Needs:
    """What an advantage estimator asks for beside rewards. One's own says so by an attribute, ``estimator.needs``."""

    min_responses: int = 1  # to one prompt
    critic: bool = False  # batch.values
    greedy_baseline: bool = False  # batch.baselines
    normalize: Literal["none", "whiten", "spread"] = "none"
    """What is done to the advantages of all ranks together: nothing; mean 0 and variance 1 over tokens; or a larger
    scale where groups without spread teach nothing (GPG)."""
    reads: tuple[str, ...] = ()  # knobs of ``algorithm`` that change its result


ESTIMATORS: dict[str, Needs] = {
    "gae": Needs(critic=True, normalize="whiten", reads=("gamma", "lam")),
    "grpo": Needs(min_responses=2, reads=("norm_adv_by_std_in_grpo",)),
    "dr_grpo": Needs(min_responses=2),
    "rloo": Needs(min_responses=2),
    "reinforce": Needs(reads=("gamma",)),
    "reinforce_plus_plus": Needs(normalize="whiten", reads=("gamma",)),
    "reinforce_plus_plus_baseline": Needs(min_responses=2, normalize="whiten"),
    "remax": Needs(greedy_baseline=True),
    "gpg": Needs(min_responses=2, normalize="spread"),
    "opo": Needs(min_responses=2),
    "grpo_passk": Needs(min_responses=2, reads=("norm_adv_by_std_in_grpo",)),
}

CLIP = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
POLICY_LOSSES: dict[str, tuple[str, ...]] = {
    "ppo_clip": (*CLIP, "clip_ratio_c"),
    "gspo": CLIP,
    "gmpo": CLIP,
    "cispo": CLIP,
    "sapo": ("tau_pos", "tau_neg"),
    "kl_cov": ("kl_cov_ratio", "ppo_kl_coef"),
    "clip_cov": (*CLIP, "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"),
    "policy_gradient": (),
}
"""Registered policy losses and the knobs of ``actor`` that change their result."""

SEQUENCE_LEVEL = ("gspo", "gmpo")  # objectives of whole responses: every response weighs the same
SELECTING = ("kl_cov", "clip_cov")  # treat some tokens apart, chosen by log-probs from before the update

ELSEWHERE = {"vanilla": "ppo_clip", "geo_mean": "gmpo", "grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
"""Names of other trainers for what has another name here."""


def needs_of(estimator: str) -> Needs:
    """Of a registered estimator; of one's own only its code can tell, at start-up."""
    return ESTIMATORS.get(estimator, Needs())


@dataclass
class KlControlConfig:
    """The weight of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = knob("fixed", "adaptive: follows target_kl")
    kl_coef: float = knob(0.001, "weight, of adaptive control at the start", ge=0)
    horizon: int = knob(10000, "of adaptive control, in responses: larger is slower", ge=1)
    target_kl: float = knob(0.1, "nats per token that adaptive control aims at", gt=0)


@dataclass
class RolloutCorrectionConfig:
    """Weighs the policy loss by how far the engine that sampled is from the trainer."""

    method: Literal["none", "tis", "mis", "icepop"] | None = knob(
        None,
        "by the ratio trainer / engine: tis cuts it at threshold, mis drops what is above, icepop what is outside "
        "[threshold_low, threshold]; none: only logged; unset: tis with rollout.max_staleness > 0, else none",
    )
    level: Literal["token", "sequence"] = knob("token", "the ratio is of a token, or of a whole response")
    threshold: float = knob(2.0, "largest ratio", gt=1)
    threshold_low: float = knob(0.5, "smallest ratio (icepop)", ge=0, le=1)


@dataclass
class FilterGroupsConfig:
    """Dynamic sampling: train only on groups whose rewards differ, and sample more prompts in place of the others."""

    enable: bool = knob(False, "refill until the batch is full of such groups")
    max_num_gen_batches: int = knob(10, "batches of prompts sampled for one step at most, then it is an error", ge=1)


@dataclass
class AlgorithmConfig:
    """What turns rewards into advantages."""

    adv_estimator: str = knob("grpo", "registered advantage estimator, see docs/algorithms.md", names=ESTIMATORS)
    norm_adv_by_std_in_grpo: bool = knob(True, "divide by the group's standard deviation; false: Dr. GRPO")
    gamma: float = knob(1.0, "discount per token", ge=0, le=1)
    lam: float = knob(1.0, "GAE's lambda", ge=0, le=1)
    use_kl_in_reward: bool = knob(False, "subtract the divergence from the reference model from the reward")
    kl_penalty: Literal["k1", "k2", "k3"] = knob("k1", "registered estimator of that divergence")
    kl_ctrl: KlControlConfig = section(KlControlConfig)
    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig)
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig)
