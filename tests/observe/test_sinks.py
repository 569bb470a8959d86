import builtins
import json
import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlhf_mp.data.types import SampleText
from rlhf_mp.errors import ConfigError
from rlhf_mp.observe.sinks import JsonlSink, TensorBoardSink, WandbSink, read_jsonl

TEXT = SampleText(prompt="3 + 4 =", response="so\n```7```", reward=1.0, truth="7")


def losses(path):
    return [(record["step"], record["loss"]) for record in read_jsonl(path)]


def test_each_step_is_a_line_that_is_on_disk_before_the_sink_is_closed(tmp_path):
    sink = JsonlSink(tmp_path / "run", first_step=0)
    sink.write(1, {"loss": 0.5, "norm": math.inf})
    sink.samples(1, [TEXT, TEXT, replace(TEXT, in_log=False)])

    (record,) = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert (record["step"], record["loss"], record["norm"]) == (1, 0.5, math.inf)
    assert record["wall_time"] > 1.7e9
    assert (
        read_jsonl(tmp_path / "run" / "samples.jsonl")
        == [
            {
                "step": 1,
                "prompt": "3 + 4 =",
                "response": "so\n```7```",
                "reward": 1.0,
                "truth": "7",
                "source": "training",
            }
        ]
        * 2
    )
    sink.close()


def test_a_resumed_run_replaces_the_steps_it_repeats(tmp_path):
    before = JsonlSink(tmp_path, first_step=0)
    for step in (1, 2, 3, 4):
        before.write(step, {"loss": float(step)})
        before.samples(step, [TEXT])
    before.close()

    resumed = JsonlSink(tmp_path, first_step=3)
    resumed.write(3, {"loss": 33.0})
    resumed.close()

    assert losses(tmp_path / "metrics.jsonl") == [(1, 1.0), (2, 2.0), (3, 33.0)]
    assert [record["step"] for record in read_jsonl(tmp_path / "samples.jsonl")] == [1, 2]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "samples.jsonl"]


def test_a_new_run_in_an_old_folder_starts_from_nothing(tmp_path):
    for _ in range(2):
        sink = JsonlSink(tmp_path, first_step=0)
        sink.write(0, {"loss": 1.0})
        sink.close()
    assert losses(tmp_path / "metrics.jsonl") == [(0, 1.0)]


def test_a_line_cut_off_by_a_kill_does_not_stop_the_resumed_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    sink = JsonlSink(tmp_path, first_step=3)
    sink.write(3, {"loss": 3.0})
    sink.close()
    assert losses(path) == [(1, 1.0), (3, 3.0)]


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1\n{"step": 2}\n')
    with pytest.raises(json.JSONDecodeError):
        JsonlSink(tmp_path, first_step=3)


def read_events(directory):
    events = EventAccumulator(str(directory), size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    return events


def test_tensorboard_reads_back_scalars_and_texts(tmp_path):
    sink = TensorBoardSink(tmp_path, first_step=0)
    sink.write(1, {"actor/pg_loss": 0.5})
    sink.write(2, {"actor/pg_loss": 0.25})
    sink.samples(2, [TEXT])

    events = read_events(tmp_path)  # before close: a killed run keeps its steps
    sink.close()

    assert [(e.step, e.value) for e in events.Scalars("actor/pg_loss")] == [(1, 0.5), (2, 0.25)]
    (text,) = events.Tensors("samples/training/text_summary")
    assert text.step == 2
    markdown = text.tensor_proto.string_val[0].decode()
    assert "**reward 1**" in markdown
    assert "    so\n    ```7```\n" in markdown


def test_tensorboard_shows_only_the_resumed_run_where_both_wrote(tmp_path):
    before = TensorBoardSink(tmp_path, first_step=0)
    for step in (1, 2, 3, 4):
        before.write(step, {"loss": float(step)})
    before.close()
    resumed = TensorBoardSink(tmp_path, first_step=3)
    resumed.write(3, {"loss": 33.0})
    resumed.close()

    assert [(e.step, e.value) for e in read_events(tmp_path).Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 33.0)]


def test_wandb_gets_metrics_and_a_table_of_texts(tmp_path, monkeypatch):
    calls = []
    run = SimpleNamespace(log=lambda data, step: calls.append((data, step)), finish=lambda: calls.append("finished"))
    fake = SimpleNamespace(
        init=lambda **kwargs: calls.append(kwargs) or run, Table=lambda columns, data: (columns, data)
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)

    sink = WandbSink("project", "experiment", {"seed": 1}, tmp_path)
    sink.write(3, {"loss": 0.5})
    sink.samples(3, [TEXT])
    sink.close()

    table = (["prompt", "response", "reward", "truth"], [["3 + 4 =", "so\n```7```", 1.0, "7"]])
    assert calls[0]["project"] == "project" and calls[0]["config"] == {"seed": 1}
    assert calls[1:] == [({"loss": 0.5}, 3), ({"samples": table}, 3), "finished"]


def test_wandb_that_is_not_installed_is_a_problem_of_the_config(tmp_path, monkeypatch):
    def no_wandb(name, *args, **kwargs):
        if name == "wandb":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    real_import = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", no_wandb)
    with pytest.raises(ConfigError, match="trainer.logger.*\n.*pip install wandb"):
        WandbSink("project", "experiment", {}, tmp_path)
