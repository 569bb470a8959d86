"""Engines beside the trainer: what cannot work is refused, what follows is filled in."""

import pytest

from rlhf_mp.config.load import config_from_dict
from rlhf_mp.errors import ConfigError

ROLLOUT, SYNC = "actor_rollout_ref.rollout", "actor_rollout_ref.weight_sync"
CORRECTION = "algorithm.rollout_correction.method"
DISJOINT = "trainer.placement=disjoint"
AHEAD = (DISJOINT, f"{ROLLOUT}.max_staleness=1")


def load(*overrides: str, device: str = "cpu"):
    tree = {"actor_rollout_ref": {"model": {"path": "m"}}, "trainer": {"device": device}}
    return config_from_dict(tree, overrides)


def refused(*overrides: str, device: str = "cpu") -> dict[str, str]:
    with pytest.raises(ConfigError) as error:
        load(*overrides, device=device)
    return {problem.key: f"{problem.reason} / {problem.fix}" for problem in error.value.problems}


def test_colocated_engines_cannot_sample_ahead():
    assert "trainer.placement=disjoint" in refused(f"{ROLLOUT}.max_staleness=1")[f"{ROLLOUT}.max_staleness"]
    load(*AHEAD)


def test_older_samples_are_weighed_unless_a_loss_of_ones_own_does_it():
    assert load().algorithm.rollout_correction.method == "none"
    assert load(*AHEAD).algorithm.rollout_correction.method == "tis"
    assert load(*AHEAD, f"{CORRECTION}=icepop").algorithm.rollout_correction.method == "icepop"
    assert "notice their age" in refused(*AHEAD, f"{CORRECTION}=none")[CORRECTION]
    own = load(*AHEAD, f"{CORRECTION}=none", "actor_rollout_ref.actor.policy_loss=my_losses:weighed")
    assert own.algorithm.rollout_correction.method == "none"


def test_ranks_hand_memory_over_to_engines_that_hand_it_back():
    key, free = "trainer.offload_during_rollout", f"{ROLLOUT}.free_cache_engine"
    asked = f"{key}=true"
    assert load(asked).engines_sleep(on_gpu=False) and not load().engines_sleep(on_gpu=False)
    assert "leave that memory to nobody" in refused(asked, f"{free}=false")[key]
    assert "no engine needs the memory" in refused(asked, DISJOINT)[key]
    assert "trainer.task=sft" in refused(asked, "trainer.task=sft")[key]


def test_a_cut_distribution_cannot_be_weighed_and_the_fix_is_one_that_works():
    assert f"{ROLLOUT}.max_staleness=0" in refused(*AHEAD, f"{ROLLOUT}.top_p=0.9")[CORRECTION]


def test_thresholds_act_with_the_default_of_sampling_ahead_and_not_without():
    threshold = "algorithm.rollout_correction.threshold=3"
    assert load(*AHEAD, threshold).algorithm.rollout_correction.threshold == 3
    assert "no effect" in refused(threshold)["algorithm.rollout_correction.threshold"]


@pytest.mark.parametrize(
    ("device", "overrides", "transport"),
    [
        ("cpu", (), "tensor"),
        ("cpu", (DISJOINT,), "tensor"),
        ("cuda", (), "tensor"),
        ("cuda", (DISJOINT,), "distributed"),
        ("auto", (DISJOINT,), "distributed"),
    ],
)
def test_weights_travel_by_what_the_placement_allows(device, overrides, transport):
    assert load(*overrides, device=device).actor_rollout_ref.weight_sync.transport == transport


def test_no_engine_can_open_a_handle_of_another_gpu():
    assert (
        f"{SYNC}.transport=distributed"
        in refused(DISJOINT, f"{SYNC}.transport=tensor", device="cuda")[f"{SYNC}.transport"]
    )


def test_engines_of_their_own_need_not_divide_the_ranks():
    apart = load(DISJOINT, "trainer.n_gpus_per_node=6", f"{ROLLOUT}.tensor_model_parallel_size=4", device="cuda")
    assert apart.actor_rollout_ref.rollout.num_engines == 1
    load(DISJOINT, "trainer.n_gpus_per_node=6", f"{ROLLOUT}.num_engines=5", device="cuda")


def test_over_sampling_does_not_go_with_greedy_baselines():
    key = f"{ROLLOUT}.over_sample_rate"
    assert "greedy" in refused("algorithm.adv_estimator=remax", f"{key}=0.2")[key]
    load(f"{key}=0.2")


def test_placement_has_no_effect_where_nothing_is_sampled():
    assert "no effect" in refused("trainer.task=sft", DISJOINT)["trainer.placement"]
