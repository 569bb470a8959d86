"""Levers that are still off: in order of cost, only those that mean something, with what the plan says they save."""

import pytest

from rlhf_mp.config.load import config_from_dict
from rlhf_mp.phase import Phase
from rlhf_mp.planner.amount import GIB
from rlhf_mp.planner.hardware import find_gpu
from rlhf_mp.planner.levers import RULES, levers_off
from rlhf_mp.planner.preflight import Machine, plan_of

MODEL, ACTOR, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout"))
OPEN = {f"{MODEL}.enable_gradient_checkpointing": "false", f"{MODEL}.logits_chunk_mb": "0"}
H100 = Machine(find_gpu("h100"), 1000 * GIB)


def run(**knobs):
    words = {"data.train_files": "x.jsonl", f"{MODEL}.path": "Qwen2.5-7B-Instruct"} | knobs
    return config_from_dict({}, [f"{key}={value}" for key, value in words.items()])


def needed(config, phase):
    return plan_of(config, H100).peak_of(phase).gpu_bytes


def keys(config, phase, plan=None):
    return [lever.key for lever in levers_off(config, phase, plan)]


def test_of_an_untouched_config_the_cheapest_comes_first():
    found = keys(run(**OPEN), Phase.train)
    assert found[:3] == [
        f"{MODEL}.logits_chunk_mb",
        f"{ACTOR}.fsdp_config.optimizer_offload",
        f"{MODEL}.enable_gradient_checkpointing",
    ]
    order = [rule.key for rule in RULES]
    assert found == sorted(found, key=order.index)


def test_what_is_on_is_not_offered_again():
    on = {f"{ACTOR}.fsdp_config.optimizer_offload": "true", f"{ACTOR}.fsdp_config.param_offload": "true"}
    assert not {*on, f"{MODEL}.logits_chunk_mb"} & {*keys(run(**on), Phase.train)}


@pytest.mark.parametrize(
    ("knobs", "absent"),
    [
        ({f"{ACTOR}.strategy": "megatron"}, f"{MODEL}.enable_activation_offload"),
        ({f"{ACTOR}.strategy": "megatron"}, f"{ACTOR}.fsdp_config.param_offload"),
        (
            {f"{ACTOR}.strategy": "megatron", f"{ACTOR}.megatron.use_distributed_optimizer": "false"},
            f"{ACTOR}.fsdp_config.optimizer_offload",
        ),
        ({f"{ACTOR}.deepspeed.zero_stage": 2}, f"{ACTOR}.fsdp_config.param_offload"),
        ({}, "actor_rollout_ref.ref.fsdp_config.param_offload"),  # no reference model
        (
            {f"{ACTOR}.use_kl_loss": "true", f"{MODEL}.lora_rank": 8},  # the actor's own base
            "actor_rollout_ref.ref.fsdp_config.param_offload",
        ),
        ({}, f"{ACTOR}.ppo_micro_batch_size_per_gpu"),  # micro-batches are cut by tokens
        ({f"{ACTOR}.ppo_max_token_len_per_gpu": 1500}, f"{ACTOR}.ppo_max_token_len_per_gpu"),  # 1024 must fit
    ],
)
def test_what_means_nothing_here_is_not_offered(knobs, absent):
    assert absent not in keys(run(**knobs), Phase.train)


def test_every_phase_has_levers_of_its_own():
    assert f"{ROLLOUT}.enforce_eager" in keys(run(), Phase.rollout)
    assert f"{MODEL}.enable_gradient_checkpointing" not in keys(run(**OPEN), Phase.score)
    assert "actor_rollout_ref.weight_sync.bucket_mb" in keys(run(), Phase.sync)


def test_what_a_lever_saves_is_the_plans_difference_and_nothing_saved_is_nothing_offered():
    config = run(**OPEN)
    first = next(levers_off(config, Phase.train, needed))
    assert first.key == f"{MODEL}.logits_chunk_mb"
    saved = needed(config, Phase.train) - needed(run(**OPEN | {first.key: first.value}), Phase.train)
    assert first.saves == saved > GIB
    assert f"{saved / GIB:.1f} GiB by plan" in str(first) and f"{first.key}=512" in str(first)
    assert config.actor_rollout_ref.model.logits_chunk_mb == 0  # trying it out left the config alone
    assert all(lever.saves > 0 for lever in levers_off(config, Phase.train, needed))


def test_every_lever_is_a_knob_and_can_be_typed():
    config = run(**OPEN)
    for phase in Phase:
        for lever in levers_off(config, phase):
            run(**OPEN | {word.split("=")[0]: word.split("=")[1] for word in [str(lever).split(" (")[0]]})


def test_selective_checkpointing_can_still_become_full():
    selective = run(**{f"{MODEL}.recompute": "selective"})
    (lever,) = (x for x in levers_off(selective, Phase.train, needed) if x.key == f"{MODEL}.recompute")
    assert lever.value == "full" and lever.saves == needed(selective, Phase.train) - needed(run(), Phase.train) > 0
    assert f"{MODEL}.recompute" not in keys(run(), Phase.train)
