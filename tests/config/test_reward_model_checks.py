"""Where a reward model is held decides which knobs act, and what it can be combined with."""

import pytest

ACTOR, OWN = "actor_rollout_ref.actor", "reward_model"
ON = [f"{OWN}.enable=true", f"{OWN}.model.path=somewhere"]
SERVED = [*ON, f"{OWN}.strategy=sglang"]


@pytest.mark.parametrize(
    ("place", "idle", "acts"),
    [
        (ON, f"{OWN}.rollout.num_engines=2", SERVED),
        (ON, f"{OWN}.rollout.max_num_batched_tokens=99", SERVED),
        (SERVED, f"{OWN}.fsdp_config.param_offload=true", ON),
        (SERVED, f"{OWN}.model.use_remove_padding=true", ON),
        (SERVED, f"{OWN}.model.quantization=nf4", ON),
        (SERVED, f"{OWN}.model.trust_remote_code=true", ON),
        ([f"{OWN}.enable=false"], f"{OWN}.strategy=sglang", ON),
    ],
)
def test_a_knob_of_the_other_place_is_a_problem(problems_of, place, idle, acts):
    key = idle.split("=")[0]
    assert "no effect" in problems_of(*place, idle)[key].reason
    assert key not in problems_of(*acts, idle)


@pytest.mark.parametrize("needs", ["algorithm.adv_estimator=remax", "algorithm.filter_groups.enable=true"])
def test_what_looks_at_responses_early_needs_scores_that_come_with_them(problems_of, needs):
    key = needs.split("=")[0]
    problem = problems_of(*ON, needs)[key]
    assert "score them later" in problem.reason and "reward_model.strategy=sglang" in problem.fix
    assert key not in problems_of(*SERVED, needs)


@pytest.mark.parametrize(
    ("words", "fits"),
    [
        (["trainer.n_gpus_per_node=2", f"{OWN}.rollout.num_engines=2"], True),
        (["trainer.n_gpus_per_node=2", f"{OWN}.rollout.num_engines=3"], False),
        (["trainer.n_gpus_per_node=2", f"{OWN}.rollout.num_engines=3", "trainer.device=cpu"], True),
        (["trainer.n_gpus_per_node=2", "trainer.nnodes=2", f"{OWN}.rollout.num_engines=4"], True),
        (["trainer.n_gpus_per_node=2", f"{OWN}.rollout.tensor_model_parallel_size=4"], False),
        (["trainer.n_gpus_per_node=2", f"{OWN}.rollout.num_engines=3", "trainer.placement=disjoint"], True),
    ],
)
def test_colocated_servers_share_the_gpus_that_there_are(problems_of, words, fits):
    found = problems_of(*SERVED, *words)
    assert (f"{OWN}.rollout.num_engines" not in found) == fits, found


def test_megatron_keeps_a_reward_model_whole(problems_of):
    key = f"{OWN}.model.quantization"
    words = [*ON, f"{key}=nf4"]
    assert key not in problems_of(*words)
    assert "megatron" in problems_of(*words, f"{ACTOR}.strategy=megatron")[key].reason
