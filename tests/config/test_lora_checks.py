"""What is wrong with an adapter is told before anything starts, each with what to type."""

import pytest

from rlhf_mp.config.load import config_from_dict, load_config
from rlhf_mp.config.lora_checks import linear_names, target_problems

MODEL, CRITIC = "actor_rollout_ref.model", "critic.model"
STRATEGY = "actor_rollout_ref.actor.strategy"
RANK = f"{MODEL}.lora_rank=8"
PPO = "algorithm.adv_estimator=gae"


ADAPTER_ONLY = "actor_rollout_ref.weight_sync.adapter_only"
SERVED = [f"{ADAPTER_ONLY}=true", "trainer.device=cpu"]


@pytest.mark.parametrize(
    ("words", "key", "reason", "mended"),
    [
        (SERVED, ADAPTER_ONLY, "there is no adapter", RANK),
        ([RANK, f"{MODEL}.quantization=nf4", *SERVED], ADAPTER_ONLY, "nf4 has left", f"{MODEL}.quantization=null"),
        (
            [RANK, f"{MODEL}.target_modules=[q_proj,up_proj]", *SERVED],
            f"{MODEL}.target_modules",
            "needs gate_proj and v_proj, too",
            f"{MODEL}.target_modules=[gate_proj,q_proj,up_proj,v_proj]",
        ),
        ([f"{MODEL}.lora_alpha=32"], f"{MODEL}.lora_alpha", "no effect with", RANK),
        ([f"{MODEL}.target_modules=[q_proj]"], f"{MODEL}.target_modules", "no effect with", RANK),
        ([PPO, f"{CRITIC}.lora_alpha=32"], f"{CRITIC}.lora_alpha", "no effect with", f"{CRITIC}.lora_rank=8"),
        ([RANK, f"{STRATEGY}=megatron"], f"{MODEL}.lora_rank", "whole models only", f"{STRATEGY}=deepspeed"),
        ([RANK, f"{MODEL}.lora_dropout=0.05"], f"{MODEL}.lora_dropout", "another model", f"{MODEL}.lora_dropout=0"),
        ([RANK, f"{MODEL}.target_modules=[]"], f"{MODEL}.target_modules", "names of layers", None),
        ([RANK, f"{MODEL}.target_modules=[all-linear,q_proj]"], f"{MODEL}.target_modules", "alone", None),
        (
            [RANK, "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.ref.fsdp_config.param_offload=true"],
            "actor_rollout_ref.ref.fsdp_config.param_offload",
            "the actor's own base",
            "actor_rollout_ref.ref.fsdp_config.param_offload=false",
        ),
    ],
)
def test_a_bad_combination_is_a_problem_and_its_fix_mends_it(problems_of, words, key, reason, mended):
    problem = problems_of(*words)[key]
    assert reason in problem.reason and problem.fix
    assert key not in problems_of(*words, mended or f"{MODEL}.target_modules=all-linear")


def test_dropout_is_for_tasks_that_sample_nothing(problems_of):
    words = [RANK, f"{MODEL}.lora_dropout=0.05", "trainer.task=sft"]
    assert f"{MODEL}.lora_dropout" not in problems_of(*words)


def test_names_from_other_trainers_are_led_here(problems_of):
    assert f"{MODEL}.lora_rank" in problems_of("lora_r=16")["lora_r"].reason
    assert f"{MODEL}.lora_rank=16" in problems_of("use_lora=true")["use_lora"].fix


def test_a_layer_the_checkpoint_does_not_have_is_told_with_those_it_has(tiny_checkpoint):
    def problems(*targets: str):
        model = {"path": str(tiny_checkpoint), "lora_rank": 4, "target_modules": list(targets)}
        return list(target_problems(config_from_dict({"actor_rollout_ref": {"model": model}})))

    assert linear_names(tiny_checkpoint) == [
        "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"
    ]  # fmt: skip
    assert problems("all-linear") == problems("q_proj", "down_proj") == []
    (problem,) = problems("q_proj", "lm_head", "query")
    assert "named lm_head, query; it has down_proj, gate_proj" in problem.reason
    assert problem.key == f"{MODEL}.target_modules"


def test_engines_that_serve_an_adapter_know_it_from_safetensors(tiny_checkpoint, tmp_path):
    policy = {"model": {"path": str(tiny_checkpoint), "lora_rank": 4}, "weight_sync": {"adapter_only": True}}
    assert list(target_problems(config_from_dict({"actor_rollout_ref": policy}))) == []
    policy["model"]["path"] = str(tmp_path)
    (problem,) = target_problems(config_from_dict({"actor_rollout_ref": policy}))
    assert problem.key == ADAPTER_ONLY and "safetensors" in problem.reason


def test_one_name_is_a_list_of_one(tmp_path):
    (tmp_path / "x.yaml").write_text("actor_rollout_ref: {model: {lora_rank: 8, target_modules: q_proj}}")
    assert load_config(tmp_path / "x.yaml").actor_rollout_ref.model.target_modules == ["q_proj"]
