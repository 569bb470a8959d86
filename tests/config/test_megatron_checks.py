"""Layouts that Megatron cannot have: told with the key to change and what to, before anything is started."""

import pytest

from rlhf_mp.config import megatron_checks
from rlhf_mp.config.load import config_from_dict, config_to_dict
from rlhf_mp.config.megatron_checks import shape_problems

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
MEGATRON = f"{ACTOR}.megatron"
ON = f"{ACTOR}.strategy=megatron"
TP, PP = (f"{MEGATRON}.{kind}_model_parallel_size" for kind in ("tensor", "pipeline"))
CP = f"{MEGATRON}.context_parallel_size"
PACKED = f"{MODEL}.use_remove_padding"
VPP = f"{MEGATRON}.virtual_pipeline_model_parallel_size"

RULES = [  # words that break the rule, key of the problem, part of the reason, part of the fix, a word that mends it
    ([ON, f"{TP}=4", f"{PP}=3"], MEGATRON, "takes 12 ranks", "n_gpus_per_node=12", "trainer.n_gpus_per_node=12"),
    ([ON, f"{CP}=3"], MEGATRON, "takes 3 ranks", "smaller sizes", f"{CP}=2"),
    (
        [ON, f"{TP}=4", "trainer.nnodes=2", "trainer.n_gpus_per_node=2"],
        TP,
        "across machines",
        f"{TP}=2, and more pipeline stages",
        f"{TP}=2",
    ),
    ([ON, f"{VPP}=2"], VPP, "nothing to interleave", f"{VPP}=null", f"{PP}=2"),
    ([ON, f"{MEGATRON}.sequence_parallel=true"], f"{MEGATRON}.sequence_parallel", "no effect", "null", f"{TP}=2"),
    ([ON, f"{PACKED}=true", f"{CP}=2"], PACKED, "cannot share", f"{PACKED}=false", f"{CP}=1"),
    (
        [ON, f"{MEGATRON}.recompute=selective", f"{MODEL}.enable_gradient_checkpointing=false"],
        f"{MEGATRON}.recompute",
        "no effect",
        f"{MODEL}.enable_gradient_checkpointing=true",
        f"{MODEL}.enable_gradient_checkpointing=true",
    ),
    (
        [ON, f"{ACTOR}.fsdp_config.param_offload=true"],
        f"{ACTOR}.fsdp_config.param_offload",
        "no effect",
        f"{ACTOR}.strategy=deepspeed",
        f"{ACTOR}.strategy=deepspeed",
    ),
    (
        [ON, f"{ACTOR}.fsdp_config.optimizer_offload=true", f"{MEGATRON}.use_distributed_optimizer=false"],
        f"{ACTOR}.fsdp_config.optimizer_offload",
        "only Megatron's distributed optimizer",
        f"{MEGATRON}.use_distributed_optimizer=true",
        f"{MEGATRON}.use_distributed_optimizer=true",
    ),
    (
        [ON, f"{MODEL}.enable_activation_offload=true"],
        f"{MODEL}.enable_activation_offload",
        "no effect",
        "enable_gradient_checkpointing=true",
        f"{ACTOR}.strategy=deepspeed",
    ),
    (
        [ON, f"{ACTOR}.deepspeed.zero_stage=2"],
        f"{ACTOR}.deepspeed",
        "no effect",
        "=deepspeed",
        f"{ACTOR}.strategy=deepspeed",
    ),
    ([f"{TP}=2"], MEGATRON, f"no effect with {ACTOR}.strategy=deepspeed", ON, ON),
]


@pytest.mark.parametrize(
    ("words", "key", "reason", "fix", "cure"), RULES, ids=lambda x: x[-1] if type(x) is list else ""
)
def test_a_broken_rule_names_key_reason_and_fix_and_can_be_mended(problems_of, words, key, reason, fix, cure):
    problems = problems_of(*words)
    assert list(problems) == [key]
    assert reason in problems[key].reason
    assert fix in problems[key].fix
    assert problems_of(*words, cure) == {}


def test_what_is_not_installed_is_said(problems_of, monkeypatch):
    monkeypatch.setattr(megatron_checks, "find_spec", lambda name: None)
    assert problems_of(ON)[f"{ACTOR}.strategy"].reason == "not installed: megatron, mbridge"
    assert "not installed" in problems_of(ON, f"{MEGATRON}.transformer_impl=te")[f"{MEGATRON}.transformer_impl"].reason


def test_a_prompt_a_copy_of_the_model_is_enough(problems_of):
    """8 ranks, 4 to a copy: 2 get data of their own."""
    words = ["data.train_batch_size=2", f"{ACTOR}.ppo_mini_batch_size=2"]
    assert list(problems_of(ON, *words)) == [f"{ACTOR}.ppo_mini_batch_size"]
    assert problems_of(ON, *words, f"{TP}=2", f"{PP}=2") == {}


def test_sequence_parallelism_comes_with_tensor_parallelism():
    derived = [config_from_dict({}, [ON, word]).actor_rollout_ref.actor.megatron for word in (f"{TP}=2", f"{PP}=2")]
    assert [megatron.sequence_parallel for megatron in derived] == [True, False]


@pytest.mark.parametrize("words", [[], [ON], [ON, f"{TP}=2"]], ids=str)
def test_a_resolved_config_has_no_new_problem(words):
    config = config_from_dict({}, words)
    assert config_from_dict(config_to_dict(config), []) == config


LLAMA = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 6}


@pytest.mark.parametrize(
    ("words", "model", "key", "reason", "fix"),
    [
        ([], {"model_type": "mixtral"}, f"{MODEL}.path", "this is of type mixtral", f"{ACTOR}.strategy=deepspeed"),
        ([f"{TP}=4"], {}, TP, "the model's 2 key-value heads", f"{TP}=2"),
        (
            [f"{TP}=8", "trainer.n_gpus_per_node=8"],
            {"num_key_value_heads": 8, "num_attention_heads": 12},
            TP,
            "12 att",
            f"{TP}=4",
        ),
        ([f"{PP}=4"], {}, PP, "6 layers do not spread evenly over 4 stages", f"{PP}=2"),
        ([f"{PP}=2", f"{VPP}=2"], {}, PP, "over 4 stages", f"{VPP}=null"),
    ],
)
def test_a_model_that_does_not_fit_a_layout(words, model, key, reason, fix):
    (problem,) = shape_problems(config_from_dict({}, [ON, *words]).trained[0], "m", LLAMA | model)
    assert problem.key == key
    assert reason in problem.reason
    assert fix in problem.fix


def test_a_model_that_fits():
    config = config_from_dict({}, [ON, f"{TP}=2", f"{PP}=2"])
    assert list(shape_problems(config.trained[0], "m", LLAMA)) == []
