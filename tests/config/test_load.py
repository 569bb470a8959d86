"""One test for each way in which a config can be wrong, and for what wins when several say something."""

import sys

import pytest
from quick_command import run_quickly

from rlhf_mp.config.load import config_from_dict, config_to_dict, dump_config, load_config
from rlhf_mp.errors import ConfigError, Problem

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def load_text(tmp_path, text, *overrides):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def problems_in(tmp_path, text, *overrides) -> list[Problem]:
    with pytest.raises(ConfigError) as error:
        load_text(tmp_path, text, *overrides)
    return error.value.problems


# --- precedence


def test_overrides_win_over_the_file_and_the_file_over_what_it_extends(tmp_path):
    (tmp_path / "base.yaml").write_text("trainer: {seed: 11, nnodes: 2, project_name: base}")
    text = "extends: base.yaml\ntrainer: {seed: 12, project_name: file}"
    trainer = load_text(tmp_path, text, "trainer.seed=13").trainer
    assert (trainer.nnodes, trainer.project_name, trainer.seed) == (2, "file", 13)


def test_extends_is_relative_to_the_file_and_may_be_repeated(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "root.yaml").write_text("trainer: {seed: 11}\ndata: {seed: 7}")
    (tmp_path / "below" / "middle.yaml").write_text("extends: root.yaml\ndata: {seed: 8}")
    config = load_text(tmp_path, "extends: below/middle.yaml")
    assert (config.trainer.seed, config.data.seed) == (11, 8)


def test_the_last_override_wins(tmp_path):
    assert load_text(tmp_path, "", "trainer.seed=2", "trainer.seed=3").trainer.seed == 3


def test_engine_args_of_several_layers_add_up(tmp_path):
    text = "{actor_rollout_ref: {rollout: {engine_args: {a: 1, b: 1}}}}"
    config = load_text(tmp_path, text, f"{ROLLOUT}.engine_args.b=2", f"{ROLLOUT}.engine_args.c=[x,3]")
    assert config.actor_rollout_ref.rollout.engine_args == {"a": 1, "b": 2, "c": ["x", 3]}


# --- values


def test_values_are_read_as_their_type(tmp_path):
    config = load_text(
        tmp_path,
        "actor_rollout_ref: {actor: {optim: {lr: 1e-4}}}",
        f"{ROLLOUT}.cudagraph_capture_sizes=[1,2]",
        f"{ROLLOUT}.max_total_tokens=null",
        "trainer.experiment_name=3",
        "data.shuffle=off",
        "data.prompt_key=",
        f"{ACTOR}.grad_clip=2",
    )
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert actor.optim.lr == 1e-4
    assert (rollout.cudagraph_capture_sizes, rollout.max_total_tokens) == ([1, 2], None)
    assert (config.trainer.experiment_name, config.data.shuffle, config.data.prompt_key) == ("3", False, "")
    assert isinstance(actor.grad_clip, float)


@pytest.mark.parametrize(
    ("written", "expected"), [("a.jsonl", ["a.jsonl"]), ("[a.jsonl,b.parquet]", ["a.jsonl", "b.parquet"]), ("", [])]
)
def test_one_file_is_a_list_of_one(tmp_path, written, expected):
    config = load_text(tmp_path, "", f"data.train_files={written}", f"data.val_files={written}")
    assert config.data.train_files == config.data.val_files == expected


def test_a_section_with_every_line_commented_out_is_empty(tmp_path):
    assert load_text(tmp_path, "data:\n  # seed: 3\ntrainer:\n  seed: 4\n").trainer.seed == 4


# --- spellings


def test_alternative_spellings_end_in_one_place():
    tree = {"model": {"fsdp_config": {"param_offload": True}}, "actor": {"learning_rate": "2e-6"}}
    actor = config_from_dict({"actor_rollout_ref": tree}).actor_rollout_ref.actor
    assert (actor.fsdp_config.param_offload, actor.optim.lr) == (True, 2e-6)


def test_two_spellings_may_agree_but_not_contradict_each_other(tmp_path):
    agree = "actor_rollout_ref: {actor: {learning_rate: 1e-5, optim: {lr: 1e-5}}}"
    assert load_text(tmp_path, agree).actor_rollout_ref.actor.optim.lr == 1e-5

    (problem,) = problems_in(tmp_path, "actor_rollout_ref: {actor: {learning_rate: 1e-5, optim: {lr: 1e-4}}}")
    assert problem.key == f"{ACTOR}.optim.lr"
    assert f"{ACTOR}.learning_rate = 1e-05" in problem.reason
    assert problem.fix == f"keep only {ACTOR}.optim.lr"

    text = (
        "actor_rollout_ref: {model: {fsdp_config: {param_offload: true}}, actor: {fsdp_config: {param_offload: false}}}"
    )
    (problem,) = problems_in(tmp_path, text)
    assert problem.key == f"{ACTOR}.fsdp_config.param_offload"


def test_an_override_in_another_spelling_wins_over_the_file(tmp_path):
    text = "actor_rollout_ref: {actor: {learning_rate: 1e-5}}"
    assert load_text(tmp_path, text, f"{ACTOR}.optim.lr=1e-4").actor_rollout_ref.actor.optim.lr == 1e-4


# --- wrong keys


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("rollout.n=4", f"{ROLLOUT}.n=4"),
        ("data.train_batch_sise=64", "data.train_batch_size=64"),
        ("trainr.nnodes=2", "trainer.nnodes=2"),
        ("trainer.epochs=3", "trainer.total_epochs=3"),
        ("actor_rollout_ref.actor.lr=1e-5", f"{ACTOR}.optim.lr=1e-05"),
        ("clip_epsilon=0.3", f"{ACTOR}.clip_ratio=0.3"),
        (f"{ACTOR}.max_grad_norm=2.0", f"{ACTOR}.grad_clip=2.0"),
        ("fsdp_config.param_offload=true", f"{ACTOR}.fsdp_config.param_offload=true"),
        (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4", f"{ACTOR}.log_prob_micro_batch_size_per_gpu=4"),
        ("data.train_file=a.jsonl", "data.train_files=a.jsonl"),
    ],
)
def test_an_unknown_key_names_the_real_one_wherever_it_is(problems_of, wrong, right):
    problem = problems_of(wrong)[wrong.partition("=")[0]]
    assert problem.reason == f"unknown key; did you mean {right.partition('=')[0]}?"
    assert problem.fix == right


def test_a_key_like_no_other_gets_no_far_fetched_suggestion(problems_of):
    problem = problems_of("zebra.stripes=12")["zebra.stripes"]
    assert problem.reason == "unknown key"
    assert "docs/config.md" in problem.fix


def test_a_misplaced_section_is_told_key_by_key(tmp_path):
    found = problems_in(tmp_path, "rollout: {n: 4, temperature: 0.7}")
    assert [p.key for p in found] == ["rollout.n", "rollout.temperature"]
    assert [p.fix for p in found] == [f"{ROLLOUT}.n=4", f"{ROLLOUT}.temperature=0.7"]


@pytest.mark.parametrize(
    ("text", "key", "reason"),
    [
        ("critic: {ppo_mini_batch_size: 4}", "critic.ppo_mini_batch_size", "actor's mini-batches"),
        ("actor_rollout_ref: {rollout: {mode: sync}}", "actor_rollout_ref.rollout.mode", "always servers"),
    ],
)
def test_a_key_with_nothing_to_act_on_says_why_and_what_to_do(tmp_path, text, key, reason):
    (problem,) = problems_in(tmp_path, text)
    assert problem.key == key
    assert reason in problem.reason
    assert problem.fix


def test_a_value_where_a_section_belongs(problems_of):
    assert problems_of("trainer=3")["trainer"].reason == "is a section, not a value"


# --- wrong values


@pytest.mark.parametrize(
    ("written", "reason", "fix"),
    [
        ("data.train_batch_size=many", "must be a whole number", "data.train_batch_size=1024"),
        ("data.train_batch_size=1.5", "must be a whole number", "data.train_batch_size=1024"),
        ("data.train_batch_size=null", "must be a whole number", "data.train_batch_size=1024"),
        (f"{ACTOR}.grad_clip=big", "must be a number", f"{ACTOR}.grad_clip=1.0"),
        ("data.shuffle=maybe", "must be true or false", "data.shuffle=true"),
        ("data.prompt_key=[a]", "must be a text", "data.prompt_key=prompt"),
        (f"{ACTOR}.optim.betas=0.9", "must be a list", f"{ACTOR}.optim.betas=[0.9, 0.999]"),
        (f"{ROLLOUT}.cudagraph_capture_sizes=[1,x]", "must be a list", f"{ROLLOUT}.cudagraph_capture_sizes=<a list"),
        (f"{ROLLOUT}.engine_args=3", "must be a mapping", f"{ROLLOUT}.engine_args=<a mapping>"),
    ],
)
def test_a_wrong_type_says_what_is_wanted_in_words(problems_of, written, reason, fix):
    (problem,) = problems_of(written).values()
    assert problem.key == written.partition("=")[0]
    assert problem.reason.startswith(reason)
    assert fix in problem.fix


@pytest.mark.parametrize(
    ("written", "reason", "fix"),
    [
        ("algorithm.adv_estimator=grpoo", "must be one of gae, grpo", "algorithm.adv_estimator=grpo"),
        (f"{ACTOR}.policy_loss=ppo_klip", "must be one of ppo_clip", f"{ACTOR}.policy_loss=ppo_clip"),
        (f"{ACTOR}.kl_loss_type=kk3", "must be one of k1, k2, k3", f"{ACTOR}.kl_loss_type=k3"),
        ("reward.name=maths", "must be one of code, environment, exact", "reward.name=math"),
        ("actor_rollout_ref.model.dtype=bf16", "float32, bfloat16", "actor_rollout_ref.model.dtype=bfloat16"),
        ("trainer.logger=[console,tensorbord]", "console, tensorboard", 'trainer.logger=["console", "tensorboard"]'),
    ],
)
def test_a_value_that_is_no_choice_names_the_choices_and_the_nearest(problems_of, written, reason, fix):
    (problem,) = problems_of(written).values()
    assert reason in problem.reason
    assert problem.fix == fix


@pytest.mark.parametrize("name", ["vllm", "hf", "tgi"])
def test_other_rollout_engines_are_refused_with_the_reason(problems_of, name):
    (problem,) = problems_of(f"{ROLLOUT}.name={name}").values()
    assert problem.found == name
    assert "rlhf_mp samples with SGLang" in problem.reason
    assert problem.fix == f"{ROLLOUT}.name=sglang"


@pytest.mark.parametrize(
    ("written", "reason", "fix"),
    [
        ("trainer.nnodes=0", "must be at least 1", "trainer.nnodes=1"),
        (f"{ACTOR}.optim.lr=0", "must be above 0", f"{ACTOR}.optim.lr=1e-06"),
        (f"{ACTOR}.clip_ratio_low=-1", "must be above 0", "remove it; unset, it follows from other knobs"),
        (f"{ROLLOUT}.top_p=1.5", "must be at most 1", f"{ROLLOUT}.top_p=1"),
        (f"{ACTOR}.deepspeed.zero_stage=4", "must be at most 3", f"{ACTOR}.deepspeed.zero_stage=3"),
        (f"{ACTOR}.grad_clip=.nan", "must be a finite number", f"{ACTOR}.grad_clip=1.0"),
        (f"{ACTOR}.optim.betas=[0.9,-1]", "must be at least 0", f"{ACTOR}.optim.betas=[0.9, 0.999]"),
    ],
)
def test_a_value_out_of_its_range(problems_of, written, reason, fix):
    problem = problems_of(written)[written.partition("=")[0]]
    assert (problem.reason, problem.fix) == (reason, fix)


def test_a_reference_to_another_key_is_refused(problems_of):
    (problem,) = problems_of("trainer.project_name=${data.seed}").values()
    assert (problem.key, problem.reason) == ("trainer.project_name", "values cannot refer to other keys")


@pytest.mark.parametrize("word", ["trainer.nnodes", "=3", "check"])
def test_a_bare_word_is_no_override(problems_of, word):
    (problem,) = problems_of(word).values()
    assert (problem.key, problem.reason) == (word, "not of the form key=value")


def test_an_override_that_is_no_yaml(problems_of):
    assert problems_of("data.train_files=[a.jsonl")["data.train_files"].reason == "the value is not YAML"


# --- files


@pytest.mark.parametrize(
    ("text", "where", "reason"),
    [
        ("data:\n  seed: 1\n bad: 2\n", ":3", "expected"),
        ("data:\n\tseed: 1", ":2", "cannot start any token"),
        ("data: {seed: 1}\ntrainer: {seed: 2}\ndata: {seed: 3}", ":3", "duplicate key data"),
        ("- data\n", "", "a list"),
        ("data: ${", "", "${"),
    ],
)
def test_a_file_that_is_no_yaml_mapping_is_told_with_its_line(tmp_path, text, where, reason):
    (problem,) = problems_in(tmp_path, text)
    assert problem.key == f"{tmp_path / 'config.yaml'}{where}"
    assert reason in problem.reason


def test_an_unclosed_bracket_is_told_where_it_opens(tmp_path):
    (problem,) = problems_in(tmp_path, "data:\n  seed: [1,\ntrainer: {}\n")
    assert "that starts on line 2" in problem.reason


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / "nowhere.yaml")
    (problem,) = error.value.problems
    assert (problem.key, problem.reason) == (str(tmp_path / "nowhere.yaml"), "there is no such file")


def test_a_folder_or_binary_file_is_unreadable(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01")
    for path in (tmp_path, tmp_path / "binary.yaml"):
        with pytest.raises(ConfigError):
            load_config(path)


def test_a_missing_base_and_a_circle_are_told(tmp_path):
    (problem,) = problems_in(tmp_path, "extends: nowhere.yaml")
    assert problem.key == str(tmp_path / "nowhere.yaml")
    (problem,) = problems_in(tmp_path, "extends: config.yaml")
    assert problem.reason == "the file extends itself"
    (problem,) = problems_in(tmp_path, "extends: [a.yaml, b.yaml]")
    assert problem.reason == "must be one file name"


def test_every_problem_is_reported_at_once(tmp_path):
    text = """
    data: {train_batch_sise: 4, max_prompt_length: long}
    actor_rollout_ref: {rollout: {name: vllm, n: 1}, actor: {clip_ratio: -1}}
    """
    found = problems_in(tmp_path, text, "rubbish", "trainer.nnodes=0")
    assert {p.key for p in found} == {
        "data.train_batch_sise",
        "data.max_prompt_length",
        f"{ROLLOUT}.name",
        f"{ROLLOUT}.n",
        f"{ACTOR}.clip_ratio",
        "rubbish",
        "trainer.nnodes",
    }
    assert all(p.reason and p.fix for p in found)


# --- what follows from other knobs


def test_unset_knobs_follow_from_others():
    config = config_from_dict(
        {
            "data": {"max_prompt_length": 100, "max_response_length": 28},
            "actor_rollout_ref": {
                "model": {"dtype": "float32"},
                "actor": {"clip_ratio": 0.1, "ppo_max_token_len_per_gpu": 999, "ppo_micro_batch_size_per_gpu": 3},
                "rollout": {"tensor_model_parallel_size": 2},
            },
            "trainer": {"nnodes": 3, "n_gpus_per_node": 4, "project_name": "p", "experiment_name": "e"},
        }
    )
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.1, 0.1)
    assert (actor.log_prob_max_token_len_per_gpu, actor.log_prob_micro_batch_size_per_gpu) == (999, 3)
    assert (rollout.dtype, rollout.max_model_len, rollout.num_engines) == ("float32", 128, 6)
    assert actor.deepspeed.zero_stage == 3
    assert config.actor_rollout_ref.weight_sync.canary_tolerance == 1e-4
    assert config.actor_rollout_ref.weight_sync.transport == "distributed"
    assert config.trainer.default_local_dir == "runs/p/e"


def test_half_precision_anywhere_loosens_the_canary(tmp_path):
    config = load_text(tmp_path, "", "actor_rollout_ref.model.dtype=float32", f"{ROLLOUT}.dtype=bfloat16")
    assert config.actor_rollout_ref.weight_sync.canary_tolerance == 0.05


@pytest.mark.parametrize(
    ("written", "stage", "reshard"),
    [
        (f"{ACTOR}.fsdp_config.reshard_after_forward=false", 2, False),
        (f"{ACTOR}.deepspeed.zero_stage=1", 1, False),
        (f"{ACTOR}.deepspeed.zero_stage=3", 3, True),
    ],
)
def test_the_zero_stage_has_two_names_that_agree_after_loading(tmp_path, written, stage, reshard):
    actor = load_text(tmp_path, "", written).actor_rollout_ref.actor
    assert (actor.deepspeed.zero_stage, actor.fsdp_config.reshard_after_forward) == (stage, reshard)


def test_the_resolved_config_loads_to_itself(tmp_path):
    config = config_from_dict(
        {
            "data": {"train_files": "a.jsonl", "system_prompt": 'say: "yes"\n# no'},
            "actor_rollout_ref": {"actor": {"optim": {"lr": 3e-7}}, "rollout": {"engine_args": {"x": [1, None]}}},
            "trainer": {"experiment_name": "1e-6"},
        }
    )
    dump_config(config, tmp_path / "resolved.yaml")
    assert load_config(tmp_path / "resolved.yaml") == config
    assert config_to_dict(config)["data"]["train_files"] == ["a.jsonl"]


# --- time


def test_loading_imports_nothing_heavy_and_takes_no_time(tmp_path):
    (tmp_path / "bad.yaml").write_text("data: {train_batch_sise: 1}")
    program = (
        "import sys; from pathlib import Path; from rlhf_mp.config.load import read_config;"
        f"assert read_config(Path({str(tmp_path / 'bad.yaml')!r}))[1];"
        "print(*sorted({'torch', 'ray', 'transformers', 'sglang', 'deepspeed', 'numpy'} & set(sys.modules)))"
    )
    assert run_quickly(2, [sys.executable, "-c", program]).stdout.split() == []
