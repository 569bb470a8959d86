"""Algorithms that cannot work, and knobs that would change nothing, are told before anything starts."""

import pytest

from rlhf_mp.config.algorithm import ESTIMATORS, POLICY_LOSSES
from rlhf_mp.config.load import config_from_dict, config_to_dict

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GSPO = [f"{ACTOR}.policy_loss=gspo"]

RULES = [  # what is written, the key named, a part of the reason, what makes it right
    ([f"{ROLLOUT}.n=1"], f"{ROLLOUT}.n", "grpo compares", [f"{ROLLOUT}.n=2"]),
    (
        [f"{ROLLOUT}.n=1", "algorithm.adv_estimator=rloo"],
        f"{ROLLOUT}.n",
        "rloo compares",
        ["algorithm.adv_estimator=remax"],
    ),
    (
        ["algorithm.adv_estimator=gae", "critic.enable=false"],
        "algorithm.adv_estimator",
        "critic.enable=false",
        ["critic.enable=true"],
    ),
    (GSPO, f"{ACTOR}.loss_agg_mode", "whole responses", [f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"]),
    (
        [f"{ACTOR}.policy_loss=kl_cov", f"{ACTOR}.ppo_mini_batch_size=1024"],
        f"{ACTOR}.policy_loss",
        "still the old one",
        [f"{ACTOR}.ppo_mini_batch_size=512"],
    ),
    (
        [f"{ACTOR}.policy_loss=clip_cov", f"{ACTOR}.clip_cov_lb=6"],
        f"{ACTOR}.clip_cov_lb",
        "no covariance",
        [f"{ACTOR}.clip_cov_ub=7"],
    ),
    (
        ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0"],
        "algorithm.kl_ctrl.kl_coef",
        "weight 0",
        ["algorithm.kl_ctrl.kl_coef=0.1"],
    ),
    (
        ["algorithm.rollout_correction.method=tis", f"{ROLLOUT}.top_p=0.9"],
        "algorithm.rollout_correction.method",
        "cut distribution",
        [f"{ROLLOUT}.top_p=1.0"],
    ),
    (
        ["algorithm.filter_groups.enable=true", "algorithm.adv_estimator=reinforce", f"{ROLLOUT}.n=1"],
        "algorithm.filter_groups.enable",
        "no batch is ever full",
        [f"{ROLLOUT}.n=2"],
    ),
    (
        ["reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=513"],
        "reward.overlong_buffer.len",
        "every response is punished",
        ["reward.overlong_buffer.len=512"],
    ),
    (["algorithm.gamma=0.9"], "algorithm.gamma", "read by gae, reinforce", ["algorithm.adv_estimator=reinforce"]),
    (["algorithm.lam=0.9"], "algorithm.lam", "read by gae", ["algorithm.adv_estimator=gae"]),
    (
        ["algorithm.adv_estimator=rloo", "algorithm.norm_adv_by_std_in_grpo=false"],
        "algorithm.norm_adv_by_std_in_grpo",
        "read by grpo",
        ["algorithm.adv_estimator=grpo"],
    ),
    ([f"{ACTOR}.tau_neg=2.0"], f"{ACTOR}.tau_neg", "read by sapo", [f"{ACTOR}.policy_loss=sapo"]),
    (
        [f"{ACTOR}.policy_loss=cispo", f"{ACTOR}.clip_ratio_c=3"],
        f"{ACTOR}.clip_ratio_c",
        "read by ppo_clip",
        [f"{ACTOR}.policy_loss=ppo_clip"],
    ),
    (["algorithm.kl_penalty=k3"], "algorithm.kl_penalty", "no effect", ["algorithm.use_kl_in_reward=true"]),
    (
        ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.target_kl=0.2"],
        "algorithm.kl_ctrl.target_kl",
        "no effect",
        ["algorithm.kl_ctrl.type=adaptive"],
    ),
    (
        ["algorithm.rollout_correction.method=tis", "algorithm.rollout_correction.threshold_low=0.1"],
        "algorithm.rollout_correction.threshold_low",
        "no effect",
        ["algorithm.rollout_correction.method=icepop"],
    ),
    (
        ["algorithm.filter_groups.max_num_gen_batches=3"],
        "algorithm.filter_groups.max_num_gen_batches",
        "no effect",
        ["algorithm.filter_groups.enable=true"],
    ),
    (
        ["reward.overlong_buffer.penalty_factor=0.5"],
        "reward.overlong_buffer.penalty_factor",
        "no effect",
        ["reward.overlong_buffer.enable=true"],
    ),
]


@pytest.mark.parametrize(("written", "key", "reason", "right"), RULES, ids=lambda x: x if isinstance(x, str) else "")
def test_each_rule_names_key_reason_and_a_way_out(problems_of, written, key, reason, right):
    found = problems_of(*written)
    assert reason in found[key].reason and found[key].fix
    assert key not in problems_of(*written, *right)


NAMES = [(name, "ppo_clip") for name in ESTIMATORS] + [("grpo", name) for name in POLICY_LOSSES]


@pytest.mark.parametrize(("estimator", "loss"), [*NAMES, ("my_package.my_module:mine", "my_module:mine")])
def test_every_algorithm_loads_and_so_does_what_it_resolves_to(estimator, loss):
    overrides = [
        f"algorithm.adv_estimator={estimator}",
        f"{ACTOR}.policy_loss={loss}",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
        "actor_rollout_ref.model.path=models/m",
        "data.train_files=train.jsonl",
    ]
    config = config_from_dict({}, overrides)
    assert config.critic.enable == (estimator == "gae")
    assert config_from_dict(config_to_dict(config)) == config


@pytest.mark.parametrize(
    ("written", "fix"),
    [
        ("algorithm.adv_estimator=reinforce++", "algorithm.adv_estimator=reinforce"),
        ("algorithm.adv_estimator=grpo_vectorized", "algorithm.adv_estimator=grpo"),
        (f"{ACTOR}.policy_loss=vanilla", f"{ACTOR}.policy_loss=ppo_clip"),  # what others call so
        (f"{ACTOR}.policy_loss=geo_mean", f"{ACTOR}.policy_loss=gmpo"),
        (f"{ACTOR}.policy_loss=gspo2", f"{ACTOR}.policy_loss=gspo"),
        (f"{ACTOR}.policy_loss=my.module:1", f"{ACTOR}.policy_loss=ppo_clip"),
    ],
)
def test_a_name_that_is_not_registered_gets_the_nearest(problems_of, written, fix):
    (problem,) = problems_of(written).values()
    assert "or package.module:function" in problem.reason and problem.fix == fix
