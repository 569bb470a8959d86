"""The command line: what launchers add, what is printed where, and exit codes."""

import json
import os
import runpy
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest
from quick_command import run_quickly

from rlhf_mp.prepare import RANK_0_FIRST_S

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "train.py"
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


SHAPE = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}


@pytest.fixture(autouse=True)
def started_by_hand(monkeypatch):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def train():
    with patch.dict(os.environ):  # a start completes what a launcher has left out
        yield runpy.run_path(str(SCRIPT))


@pytest.fixture
def sound(tmp_path):
    """A config file with model and data in place."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SHAPE))
    header = b'{"weight":{"shape":[1000,1234]}}'
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (model / "tokenizer.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 64)
    (tmp_path / "run.yaml").write_text(
        f"data: {{train_files: {tmp_path / 'train.jsonl'}, train_batch_size: 64, apply_chat_template: false}}\n"
        f"actor_rollout_ref: {{model: {{path: {model}}}, actor: {{ppo_mini_batch_size: 16}}, rollout: {{n: 4}}}}\n"
        "trainer: {n_gpus_per_node: 2}\n"
    )
    return tmp_path / "run.yaml"


def test_accepts_what_the_deepspeed_launcher_passes(train):
    args = train["parse_args"](["--local_rank=3", "--config", "x.yaml", "trainer.nnodes=4", "--check", "a.b=c"])
    assert (args.local_rank, args.overrides, args.check) == (3, ["trainer.nnodes=4", "a.b=c"], True)


def test_problems_of_values_and_of_files_come_in_one_report(train, sound, capsys):
    words = ["data.train_batch_sise=1", "actor_rollout_ref.rollout.n=1", "data.val_files=nowhere.jsonl"]
    assert train["main"](["--config", str(sound), "--check", *words]) == 2
    report = capsys.readouterr().err
    for text in ("data.train_batch_sise", "actor_rollout_ref.rollout.n = 1", "nowhere.jsonl", "3 problem(s)"):
        assert report.count(text) >= 1


def test_only_rank_0_prints_and_the_others_fail_after_it(train, sound, capsys, monkeypatch):
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert train["main"](["--config", str(sound), "trainer.nnodes=0"]) == 2
    assert capsys.readouterr() == ("", "")
    assert waited == [RANK_0_FIRST_S]  # a launcher would end rank 0 before it has printed
    monkeypatch.setenv("RANK", "0")
    assert train["main"](["--config", str(sound), "trainer.nnodes=0"]) == 2
    assert "trainer.nnodes = 0" in capsys.readouterr().err
    assert len(waited) == 1


def test_a_run_needs_the_planned_ranks_but_a_check_does_not(train, sound, capsys):
    assert train["main"](["--config", str(sound)]) == 2
    assert "the launcher started 1 rank(s)" in capsys.readouterr().err
    assert train["main"](["--config", str(sound), "--check"]) == 0


def test_a_check_prints_the_arithmetic_and_a_config_that_loads_to_the_same(train, sound, capsys, tmp_path):
    assert train["main"](["--config", str(sound), "--check"]) == 0
    text = capsys.readouterr().out
    assert "64 prompts x 4 = 256 responses a step" in text
    assert "4 mini-batches of 16 prompts x 1 epoch(s) = 4 optimizer steps" in text
    assert "128 responses a rank" in text
    assert "1.23M parameters" in text
    (tmp_path / "resolved.yaml").write_text(text.partition("# resolved configuration")[2])
    assert train["main"](["--config", str(tmp_path / "resolved.yaml"), "--check"]) == 0
    assert capsys.readouterr().out == text


def test_a_bad_config_exits_2_within_two_seconds_without_a_traceback(tmp_path):
    (tmp_path / "bad.yaml").write_text("actor_rollout_ref: {rollout: {name: vllm}}")
    command = [sys.executable, SCRIPT, "--config", tmp_path / "bad.yaml", "--check"]
    run = run_quickly(2, command, exit_code=2, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert "actor_rollout_ref.rollout.name=sglang" in run.stderr
    assert "Traceback" not in run.stderr


def test_help_shows_commands_to_copy(train, capsys):
    with pytest.raises(SystemExit) as stop:
        train["parse_args"](["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "deepspeed --num_gpus 2 launch/train.py --config configs/quickstart.yaml" in text
    assert "local_rank" not in text


def test_a_run_that_cannot_fit_is_refused_before_anything_starts_unless_told_to_try(train, sound, capsys, monkeypatch):
    started = []
    import rlhf_mp.run

    monkeypatch.setattr(rlhf_mp.run, "run", lambda config, info: started.append(info.rank) or 0)
    huge = SHAPE | {"hidden_size": 65536, "intermediate_size": 262144, "num_hidden_layers": 200}
    (sound.parent / "model" / "config.json").write_text(json.dumps(huge))
    words = ["--config", str(sound), "trainer.n_gpus_per_node=1"]

    assert train["main"](words) == 2
    report = capsys.readouterr().err
    assert "too much" in report
    assert "trainer.skip_plan=true" in report
    assert started == []
    assert train["main"]([*words, "trainer.skip_plan=true"]) == 0
    assert started == [0]


def test_a_check_needs_neither_model_nor_data_but_names_what_a_start_would_miss(train, capsys):
    config = ROOT / "configs" / "grpo_qwen2.5_7b_deepspeed.yaml"
    assert train["main"](["--config", str(config), "--check"]) == 0
    text = capsys.readouterr().out
    assert "not on this machine, and needed to start" in text
    assert "models/Qwen2.5-7B-Instruct" in text
    assert "Qwen2.5-7B: 7,615,616,512 parameters" in text
    assert "1024 prompts x 8" in text
