import json
import platform

import pytest
import torch

import rlhf_mp
from rlhf_mp.observe.machine import git_commit, machine, versions
from rlhf_mp.observe.summary import before_after_table, results, write_summary

RATE = "throughput/tokens_per_s"
RECORDS = [
    {"step": 0, "time/eval_s": 1.0, "eval/accuracy": 0.1, "eval/reward_mean": 0.12},
    {"step": 1, "time/step_s": 30.0, "time/rollout_s": 9.0, "rollout/reward_mean": 0.2, RATE: 1.0},
    {"step": 2, "time/step_s": 4.0, "time/rollout_s": 1.0, "rollout/reward_mean": 0.4, RATE: 100.0},
    {"step": 3, "time/step_s": 1.0, "time/rollout_s": 2.0, "rollout/reward_mean": 0.8, RATE: 200.0},
    {"step": 3, "time/eval_s": 2.0, "eval/accuracy": 0.9, "eval/reward_mean": 0.88},
]


def test_results_tell_steps_time_and_what_changed():
    found = results(RECORDS)
    assert found["num_steps"] == 3
    assert found["seconds"] == 30 + 4 + 1 + 1 + 2
    assert (found["eval/accuracy_first"], found["eval/accuracy_last"]) == (0.1, 0.9)
    assert (found["rollout/reward_mean_first"], found["rollout/reward_mean_last"]) == (0.2, 0.8)


def test_the_first_step_stands_apart_and_rates_are_weighted_by_time():
    phases = results(RECORDS)["phases"]
    # steps 2 and 3: (100 x 4 + 200 x 1) tokens in 5 s
    assert phases["step"] == {"first_s": 30.0, "mean_s": 2.5, "tokens_per_s": 120.0}
    assert phases["rollout"] == {"first_s": 9.0, "mean_s": 1.5}
    assert set(phases) == {"step", "rollout"}


def test_a_run_of_one_step_has_only_that_step_to_average():
    assert results(RECORDS[:2])["phases"]["rollout"] == {"first_s": 9.0, "mean_s": 9.0}


def test_a_run_without_validation_says_nothing_about_it():
    assert not [name for name in results(RECORDS[1:4]) if name.startswith("eval/")]


def test_the_summary_on_disk_is_what_was_returned_and_replaces_an_older_one(tmp_path):
    path = tmp_path / "summary.json"
    path.write_text("older")
    summary = write_summary(path, RECORDS, config={"data": {"seed": 1}}, paths={"hf": "runs/hf"})
    assert json.loads(path.read_text()) == summary
    assert summary["config"] == {"data": {"seed": 1}}
    assert summary["paths"] == {"hf": "runs/hf"}
    assert summary["versions"]["torch"] == torch.__version__
    assert list(tmp_path.iterdir()) == [path]


def test_a_summary_that_cannot_be_written_leaves_the_older_one(tmp_path):
    path = tmp_path / "summary.json"
    path.write_text("older")
    with pytest.raises(TypeError):
        write_summary(path, RECORDS, config={"path": tmp_path}, paths={})
    assert path.read_text() == "older"


def test_the_table_shows_before_after_cost_and_where_to_look():
    table = before_after_table(results(RECORDS) | {"paths": {"tensorboard": "runs/tb", "hf": "runs/hf"}, "best": None})
    assert table.splitlines() == [
        "                        before     after",
        "validation accuracy      0.100     0.900",
        "validation reward        0.120     0.880",
        "training reward          0.200     0.800",
        "",
        "steps                 3",
        "time                  38s (2.5 s/step)",
        "tokens/s              120",
        "tensorboard           runs/tb",
        "hf                    runs/hf",
    ]


def test_a_run_resumed_at_its_end_still_has_a_table():
    table = before_after_table(results([RECORDS[0]]) | {"paths": {}, "best": None})
    assert "validation accuracy      0.100     0.100" in table
    assert "training reward" not in table


def test_the_table_tells_each_validation_file_and_the_best_validation():
    records = [
        {"step": step, "time/eval_s": 1.0, "eval/accuracy": 0.1 * step, "eval/math/test/accuracy": 0.2 * step}
        for step in (1, 4)
    ]
    best = {"metric": "eval/accuracy", "mode": "max", "value": 0.4, "step": 4}
    table = before_after_table(results(records) | {"paths": {}, "best": best}).splitlines()
    assert table[1:3] == ["validation accuracy      0.100     0.400", "  math/test              0.200     0.800"]
    assert "best validation       eval/accuracy 0.400 at step 4" in table


def test_the_machine_is_described_without_its_name():
    found = machine()
    assert found["num_cores"] >= 1 and found["memory_gib"] > 0.1 and found["cpu"]
    assert len(found["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert platform.node() not in found.values()


def test_only_installed_packages_have_a_version(monkeypatch):
    monkeypatch.setattr("rlhf_mp.observe.machine.PACKAGES", ("torch", "no-such-package"))
    assert versions() == {"rlhf_mp": rlhf_mp.__version__, "torch": torch.__version__}


def test_outside_a_checkout_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(rlhf_mp, "__file__", str(tmp_path / "rlhf_mp" / "__init__.py"))
    assert git_commit() is None
