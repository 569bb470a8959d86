"""Where a replay starts, what it is compared with and what it says; tests/e2e/test_job_replay.py replays real runs."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_mp import checkpoint
from rlhf_mp.config.load import config_from_dict, dump_config, load_config
from rlhf_mp.config.replay import read_replay
from rlhf_mp.data import step_batch
from rlhf_mp.data.collate import collate
from rlhf_mp.data.step_batch import StepBatch
from rlhf_mp.data.types import MiniBatch, Totals, Trajectory
from rlhf_mp.errors import CheckpointError, ConfigError
from rlhf_mp.replay import Found, Outcome, Start, choose_start
from rlhf_mp.replay_report import differences, report
from rlhf_mp.train.nonfinite import Finding

BATCH = collate([Trajectory([7], [2, 1], [-0.1, -0.2], [True] * 2, 1.0, 0, 0, "stop")])
PART = StepBatch(9, 0, 1, BATCH, {"actor": [MiniBatch([[0]], Totals(2, 1))]}, {"actor": []}, 20)


def save(run_dir: Path, *steps: int) -> None:
    for step in steps:
        folder = checkpoint.folder_of(run_dir, step)
        (checkpoint.start(folder) / "weights").write_bytes(b"weights")
        checkpoint.finish(folder, {"step": step})


def keep(run_dir: Path, *steps: int) -> None:
    for step in steps:
        step_batch.write(step_batch.folder_of(run_dir, step), replace(PART, step=step))


def start(run_dir: Path, part: StepBatch = PART, *, nearest: bool = False) -> Start:
    return choose_start(run_dir, 9, part, nearest=nearest, say=lambda text: None)


def test_it_starts_from_the_newest_weights_before_the_step(tmp_path):
    save(tmp_path, 3, 6, 9, 12)
    keep(tmp_path, 7, 8, 9)
    assert start(tmp_path) == Start(checkpoint.folder_of(tmp_path, 6), 6, [7, 8])


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    save(tmp_path, 3, 6)
    keep(tmp_path, 4, 5, 6, 7, 8, 9)
    (checkpoint.folder_of(tmp_path, 6) / "weights").write_bytes(b"Weights")
    assert start(tmp_path) == Start(checkpoint.folder_of(tmp_path, 3), 3, [4, 5, 6, 7, 8])


def test_weights_after_a_step_that_changed_nothing_are_those_before_it(tmp_path):
    save(tmp_path, 6, 9)
    unchanged = replace(PART, skipped={"actor": [0]})
    assert start(tmp_path, unchanged) == Start(checkpoint.folder_of(tmp_path, 9), 8, [])


def test_the_first_steps_start_from_the_model_itself(tmp_path):
    save(tmp_path, 9)
    keep(tmp_path, *range(1, 10))
    assert start(tmp_path) == Start(None, 0, [1, 2, 3, 4, 5, 6, 7, 8])


def test_missing_batches_are_told_and_older_weights_used_only_when_asked_for(tmp_path):
    save(tmp_path, 6)
    keep(tmp_path, 8, 9)
    with pytest.raises(CheckpointError, match=r"of step 6, and the batches of 1 of .*\n    fix: --nearest"):
        start(tmp_path)
    assert start(tmp_path, nearest=True) == Start(checkpoint.folder_of(tmp_path, 6), 6, [], skipped=2)


def outcome(logged: dict, metrics: dict, found=(), start=Start(None, 0, [])) -> Outcome:
    return Outcome(start, metrics, logged, [*found], [], one_update_only=False)


def test_two_that_are_no_numbers_are_the_same_and_one_alone_is_not():
    nan, inf = math.nan, math.inf
    found = differences(
        outcome(
            {"a": nan, "b": inf, "c": 1.0, "d": 2.0, "e": 200.0}, {"a": inf, "b": nan, "c": nan, "d": 2.0, "e": 201.0}
        )
    )
    assert found == {"a": 0, "b": 0, "c": inf, "d": 0, "e": pytest.approx(0.005)}


@pytest.fixture
def run_dir(tmp_path) -> Path:
    """A run on two ranks with TP 2 and the batch of step 9."""
    keep(tmp_path, 9)
    megatron = {"tensor_model_parallel_size": 2}
    policy = {"model": {"path": "model"}, "actor": {"strategy": "megatron", "megatron": megatron}}
    data = {"train_files": "a.jsonl", "train_batch_size": 8}
    policy["actor"]["ppo_mini_batch_size"] = 8
    tree = {"data": data, "actor_rollout_ref": policy, "trainer": {"n_gpus_per_node": 2, "device": "cpu"}}
    dump_config(config_from_dict(tree), step_batch.folder_of(tmp_path, 9) / "config.yaml")
    return tmp_path


def test_on_its_own_backend_a_run_keeps_its_layout(run_dir):
    run = read_replay(run_dir, 9, None, [], 2, nearest=False)
    assert not run.changes_backend and run.config.actor_rollout_ref.actor.megatron.tensor_model_parallel_size == 2


def test_on_another_backend_every_rank_has_the_whole_model(run_dir):
    run = read_replay(run_dir, 9, "torch", [], 1, nearest=False)
    assert run.changes_backend and run.config.actor_rollout_ref.actor.strategy == "torch"
    assert run.saved.actor_rollout_ref.actor.strategy == "megatron"
    assert run.saved.actor_rollout_ref.actor.megatron.tensor_model_parallel_size == 1  # there is one rank
    assert run.config.trainer.num_ranks == run.saved.trainer.num_ranks == 1


@pytest.mark.parametrize(
    ("words", "ranks", "message"),
    [
        (["actor_rollout_ref.actor.megatron.tensor_model_parallel_size=3"], 2, "a copy of the model takes 3 ranks"),
        (["actor_rollout_ref.actor.no_such_knob=1"], 2, "no_such_knob"),
    ],
)
def test_what_cannot_run_is_told_before_anything_starts(run_dir, words, ranks, message):
    with pytest.raises(ConfigError, match=message):
        read_replay(run_dir, 9, None, words, ranks, nearest=False)


def test_an_adapter_is_not_carried_to_another_backend(run_dir, monkeypatch):
    def with_adapter(path):
        config = load_config(path)
        config.actor_rollout_ref.model.lora_rank = 4
        return config

    monkeypatch.setattr("rlhf_mp.config.replay.load_config", with_adapter)
    with pytest.raises(ConfigError, match="an adapter of its own"):
        read_replay(run_dir, 9, "torch", [], 1, nearest=False)
    assert not read_replay(run_dir, 9, None, [], 2, nearest=False).changes_backend


def test_a_batch_that_was_not_kept_is_told_with_those_that_were(run_dir):
    with pytest.raises(ConfigError, match="its batch was not kept; those of steps 9 were"):
        read_replay(run_dir, 10, None, [], 2, nearest=False)


def test_the_report_names_rows_and_tokens(run_dir, monkeypatch):
    run = read_replay(run_dir, 9, None, [], 2, nearest=False)
    monkeypatch.setattr("rlhf_mp.replay_report._decoder", lambda run: lambda token: f"<{token}>")
    finding = Finding("the loss", 3, [4, 5])
    found = [Found("actor, update 1", 1, finding, 2, 0.5, [(4, 11), (5, 12)])]
    text = report(run, outcome({}, {"actor/grad_norm": math.nan}, found), 1e-5)
    assert (
        "actor, update 1: the loss, row 3 of rank 1 (group 2, reward 0.5): token 4 ('<11>', id 11), 5 ('<12>', id 12)"
        in text
    )
    assert "the run logged nothing of this step" in text
    assert "weights: the model that the run began with" in text
