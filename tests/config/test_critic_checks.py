"""When there is a critic, what it takes over from the actor, and what it cannot have."""

import json
from pathlib import Path

import pytest

from rlhf_mp.config.checkpoint_folder import trained_facts
from rlhf_mp.config.load import config_from_dict, config_to_dict
from rlhf_mp.config.model_folder import critic_problems

ACTOR, MODEL, GAE = "actor_rollout_ref.actor", "actor_rollout_ref.model", "algorithm.adv_estimator=gae"
MEGATRON = [GAE, f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.tensor_model_parallel_size=2"]
WARMUP = "trainer.critic_warmup"

RULES = [  # words that break the rule, key of the problem, part of the reason, part of the fix, a word that mends it
    (["critic.optim.lr=1e-5"], "critic.optim", "needs no critic", GAE, GAE),
    (["critic.strategy=megatron"], "critic.strategy", "needs no critic", GAE, GAE),
    ([f"{WARMUP}=3"], WARMUP, "needs no critic", f"{WARMUP}=0", GAE),
    (["critic.enable=true"], "critic.enable", "never looks at its values", "critic.enable=false", GAE),
    (
        [GAE, "critic.enable=false"],
        "algorithm.adv_estimator",
        "critic.enable=false",
        "critic.enable=true",
        "critic.enable=true",
    ),
    (
        [GAE, f"{WARMUP}=7", "trainer.total_training_steps=7"],
        WARMUP,
        "the policy would never be trained",
        f"{WARMUP}=0",
        f"{WARMUP}=6",
    ),
    (
        [GAE, "critic.forward_max_token_len_per_gpu=1000"],
        "critic.forward_max_token_len_per_gpu",
        "one sequence may be longer",
        "critic.forward_max_token_len_per_gpu=1024",
        f"{ACTOR}.use_dynamic_bsz=false",
    ),
    (
        [GAE, "critic.fsdp_config.param_offload=true", "critic.deepspeed.zero_stage=2"],
        "critic.fsdp_config.param_offload",
        "critic.deepspeed.zero_stage = 2",
        "critic.deepspeed.zero_stage=3",
        "critic.deepspeed.zero_stage=3",
    ),
    (
        [GAE, "critic.optim.betas=[0.9,1.0]"],
        "critic.optim.betas",
        "AdamW has two",
        "critic.optim.betas=",
        "critic.optim.betas=[0.9,0.95]",
    ),
    ([GAE, "critic.strategy=torch"], "critic.strategy", "one process", "deepspeed", "critic.strategy=deepspeed"),
    (
        [*MEGATRON, "critic.deepspeed.zero_stage=2"],
        "critic.deepspeed",
        "no effect with critic.strategy=megatron",
        "critic.strategy=deepspeed",
        "critic.strategy=deepspeed",
    ),
    (
        [*MEGATRON, "critic.megatron.tensor_model_parallel_size=4"],
        "critic.megatron.tensor_model_parallel_size",
        "spreads all models of a job alike",
        "critic.megatron.tensor_model_parallel_size=2",
        f"{ACTOR}.megatron.tensor_model_parallel_size=4",
    ),
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


def test_there_is_one_where_the_estimator_needs_it():
    assert not config_from_dict({}).critic.enable
    assert config_from_dict({}, [GAE]).critic.enable


def test_what_is_unset_is_the_actors():
    words = [f"{ACTOR}.ppo_epochs=3", f"{ACTOR}.ppo_max_token_len_per_gpu=5000", f"{MODEL}.path=m"]
    config = config_from_dict({}, [*MEGATRON, *words, f"{MODEL}.dtype=float32"])
    critic, actor = config.critic, config.actor_rollout_ref.actor
    assert (critic.strategy, critic.ppo_epochs, critic.forward_max_token_len_per_gpu) == ("megatron", 3, 5000)
    assert (critic.model.path, critic.model.dtype, critic.megatron) == ("m", "float32", actor.megatron)
    own = config_from_dict({}, [GAE, "critic.ppo_epochs=2", "critic.model.path=c", "critic.learning_rate=2e-5"]).critic
    assert (own.ppo_epochs, own.model.path, own.optim.lr, own.strategy) == (2, "c", 2e-5, "deepspeed")


def test_a_part_of_the_ranks_gets_data_of_its_own_if_either_model_takes_several():
    critic = [GAE, "critic.strategy=megatron", "critic.megatron.tensor_model_parallel_size=4"]
    assert config_from_dict({}, critic).data_parallel_size == 2


@pytest.mark.parametrize("words", [[], [GAE], MEGATRON, [GAE, "critic.strategy=megatron"]], ids=str)
def test_a_resolved_config_has_no_new_problem(words):
    config = config_from_dict({}, words)
    assert config_from_dict(config_to_dict(config), []) == config


def write_model(folder: Path, **config) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 96, "hidden_size": 64} | config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_text("")
    return folder


def test_its_checkpoint_must_be_there_and_read_the_actors_tokens(tmp_path):
    words = [GAE, f"{MODEL}.path={write_model(tmp_path / 'actor')}"]
    assert list(critic_problems(config_from_dict({}, words))) == []
    same = write_model(tmp_path / "same", hidden_size=32)
    assert list(critic_problems(config_from_dict({}, [*words, f"critic.model.path={same}"]))) == []
    (absent,) = critic_problems(config_from_dict({}, [*words, "critic.model.path=nowhere"]))
    assert absent.key == "critic.model.path" and "no such folder" in absent.reason
    other = write_model(tmp_path / "other", vocab_size=128)
    (problem,) = critic_problems(config_from_dict({}, [*words, f"critic.model.path={other}"]))
    assert "has 128 tokens, the actor's 96" in problem.reason and str(tmp_path / "actor") in problem.fix


def test_a_checkpoint_remembers_what_trained_it(tmp_path):
    path = write_model(tmp_path / "actor")
    words = [GAE, f"{MODEL}.path={path}", "critic.strategy=megatron"]
    assert trained_facts(config_from_dict({}, words)) == {
        "trainer.task": "rl",
        "actor_rollout_ref.actor.strategy": "deepspeed",
        "critic.strategy": "megatron",
        "critic.model": {"vocab_size": 96, "hidden_size": 64},
    }
    assert trained_facts(config_from_dict({}, words[1:2])).keys() == {"trainer.task", "actor_rollout_ref.actor.strategy"}
