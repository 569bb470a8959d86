"""Which knobs act in which task, and the rules of tasks without sampling."""

import pytest

from rlhf_mp.config.keys import KNOBS, SECTIONS
from rlhf_mp.config.load import check_layers, config_from_dict, config_to_dict
from rlhf_mp.config.row_rules import rules_of
from rlhf_mp.config.schema import DataConfig
from rlhf_mp.config.task_checks import ACTS_IN, acts_in

ACTOR = "actor_rollout_ref.actor"
SMALL = ["data.train_batch_size=8", "data.max_length=64"]


def test_every_key_of_the_table_is_a_knob_or_a_section():
    assert ACTS_IN.keys() <= KNOBS.keys() | SECTIONS.keys()


@pytest.mark.parametrize(
    ("key", "tasks"),
    [
        ("trainer.seed", {"rl", "sft", "dpo", "reward_model"}),
        ("actor_rollout_ref.rollout.val_kwargs.n", {"rl"}),
        ("reward_model.model.path", {"rl"}),
        ("dpo.beta", {"dpo"}),
        (f"{ACTOR}.loss_agg_mode", {"rl", "sft"}),
    ],
)
def test_a_knob_acts_where_its_longest_known_prefix_does(key, tasks):
    assert acts_in(key) == tasks


@pytest.mark.parametrize(
    ("task", "override"),
    [
        ("sft", "actor_rollout_ref.rollout.n=4"),
        ("sft", "dpo.beta=0.2"),
        ("sft", "algorithm.norm_adv_by_std_in_grpo=false"),
        ("sft", f"{ACTOR}.use_kl_loss=true"),
        ("sft", "actor_rollout_ref.ref.fsdp_config.param_offload=true"),
        ("dpo", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum"),
        ("dpo", "data.margin_key=by"),
        ("reward_model", "reward_model.coef=2.0"),
        ("rl", "data.chosen_key=better"),
        ("rl", "data.max_length=64"),
    ],
)
def test_a_knob_of_another_task_has_no_effect_and_that_is_said(problems_of, task, override):
    key = override.split("=")[0]
    found = problems_of(f"trainer.task={task}", *(SMALL if task != "rl" else []), override)
    assert key in found and f"no effect with trainer.task={task}" in found[key].reason


@pytest.mark.parametrize("task", ["rl", "sft", "dpo", "reward_model"])
def test_a_resolved_configuration_names_every_knob_and_is_no_problem(task):
    words = [f"trainer.task={task}", *(SMALL if task != "rl" else [])]
    tree = config_to_dict(config_from_dict({}, words))
    config, problems = check_layers([tree], [])
    assert problems == [] and config_to_dict(config) == tree


@pytest.mark.parametrize("task", ["sft", "dpo", "reward_model"])
def test_rules_of_sampling_are_not_asked_of_a_task_without(problems_of, task):
    """A mini-batch that does not divide the batch, engines that cannot share the GPUs."""
    assert problems_of(f"trainer.task={task}", "data.train_batch_size=100", "trainer.n_gpus_per_node=3") == {}


def test_the_batch_must_feed_every_rank(problems_of):
    found = problems_of("trainer.task=sft", "data.train_batch_size=7")
    assert found["data.train_batch_size"].fix.startswith("data.train_batch_size=8")


def test_a_pair_must_fit_a_micro_batch(problems_of):
    words = ["trainer.task=dpo", "data.train_batch_size=8", "data.max_length=100"]
    for name in ("ppo_max_token_len_per_gpu", "log_prob_max_token_len_per_gpu"):
        assert f"{ACTOR}.{name}" in problems_of(*words, f"{ACTOR}.{name}=199")
        assert problems_of(*words, f"{ACTOR}.{name}=200", f"{ACTOR}.ppo_max_token_len_per_gpu=200") == {}
    found = problems_of(*words, f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=1")
    assert found[f"{ACTOR}.ppo_micro_batch_size_per_gpu"].fix == f"{ACTOR}.ppo_micro_batch_size_per_gpu=2"
    assert problems_of("trainer.task=sft", *SMALL, f"{ACTOR}.ppo_max_token_len_per_gpu=64") == {}


def test_conversations_need_the_template_and_nothing_beside_it(problems_of):
    chats = ["trainer.task=sft", *SMALL, "data.messages_key=messages"]
    assert problems_of(*chats) == {}
    assert "data.response_key" in problems_of(*chats, "data.response_key=answer")
    assert "data.apply_chat_template" in problems_of(*chats, "data.apply_chat_template=false")


def test_a_reward_model_needs_a_path_and_a_weight(problems_of):
    on = ["reward_model.enable=true", "reward_model.model.path=somewhere"]
    assert problems_of(*on) == {}
    assert "reward_model.model.path" in problems_of("reward_model.enable=true")
    assert "reward_model.coef" in problems_of(*on, "reward_model.coef=0")
    assert "reward_model.fsdp_config.optimizer_offload" in problems_of(
        *on, "reward_model.fsdp_config.optimizer_offload=true"
    )
    assert "reward_model.coef" in problems_of("reward_model.coef=2.0"), (
        "without a reward model its weight means nothing"
    )


CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("task", "data", "row", "reason"),
    [
        ("sft", {}, {"prompt": "q", "response": "a"}, None),
        ("sft", {}, {"prompt": "q", "response": ""}, "'response' must be a text, and not empty"),
        ("sft", {}, {"prompt": "q"}, "has no 'response'"),
        ("sft", {"messages_key": "m"}, {"m": CHAT}, None),
        ("sft", {"messages_key": "m"}, {"m": CHAT[:1]}, "no message of the assistant"),
        ("sft", {"messages_key": "m"}, {"m": "q"}, "must be a list of messages"),
        ("dpo", {}, {"prompt": "q", "chosen": "a", "rejected": "b"}, None),
        ("dpo", {}, {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": "b"}, None),
        ("dpo", {}, {"prompt": "q", "chosen": "a", "rejected": "a"}, "are the same, so neither is better"),
        ("dpo", {}, {"prompt": "q", "chosen": "a", "rejected": 3}, "'rejected' must be a text"),
        ("dpo", {"apply_chat_template": False}, {"prompt": "q", "chosen": CHAT, "rejected": "b"}, "chat template"),
        ("reward_model", {"margin_key": "by"}, {"prompt": "q", "chosen": "a", "rejected": "b", "by": 0.5}, None),
        ("reward_model", {"margin_key": "by"}, {"prompt": "q", "chosen": "a", "rejected": "b", "by": -1}, "0 or more"),
        ("reward_model", {"margin_key": "by"}, {"prompt": "q", "chosen": "a", "rejected": "b", "by": "x"}, "a number"),
        ("reward_model", {}, {"prompt": "q", "chosen": "a", "rejected": "b"}, None),
    ],
)  # fmt: skip
def test_what_a_row_must_hold(task, data, row, reason):
    problem = rules_of(DataConfig(**data), task).problem(row, "rows.jsonl:7")
    assert (problem is None) == (reason is None)
    if reason:
        assert problem.key == "rows.jsonl:7" and reason in problem.reason


@pytest.mark.parametrize("task", ["sft", "dpo", "reward_model"])
def test_bad_lines_of_a_file_are_named_before_anything_starts(tmp_path, task):
    from rlhf_mp.config.data_files import data_problems

    good = {"sft": '{"prompt": "q", "response": "a"}'}.get(task, '{"prompt": "q", "chosen": "a", "rejected": "b"}')
    (tmp_path / "rows.jsonl").write_text(f'{good}\n{good}\n{{half\n{good[:-1]}, "prompt": 3}}\n')
    words = [f"trainer.task={task}", "data.train_batch_size=2", "trainer.n_gpus_per_node=1"]
    config = config_from_dict({}, [*words, f"data.train_files={tmp_path / 'rows.jsonl'}"])
    problems = {problem.key: problem.reason for problem in data_problems(config)}
    assert "not JSON" in problems[f"{tmp_path / 'rows.jsonl'}:3"]
    assert "'prompt' must be a text" in problems[f"{tmp_path / 'rows.jsonl'}:4"]
    assert len(problems) == 2
