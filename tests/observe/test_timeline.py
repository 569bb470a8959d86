"""Events as https://ui.perfetto.dev reads them (Trace Event Format), one part for each process."""

import json
import subprocess
import sys

import pytest

from rlhf_mp.config.load import config_from_dict
from rlhf_mp.observe import timeline as module
from rlhf_mp.observe.timeline import Timeline, main, make_timeline, put_together


@pytest.fixture
def clock(monkeypatch):
    """Seconds; tests set them."""
    now = [100.0]
    monkeypatch.setattr(module.time, "time", lambda: now[0])
    return now


def events(run_dir, *phases):
    whole = json.loads((run_dir / "timeline.json").read_text())["traceEvents"]
    return [event for event in whole if event["ph"] in phases]


def test_spans_lie_inside_each_other_in_microseconds(tmp_path, clock):
    rank = Timeline(tmp_path / "timeline" / "rank_0.jsonl", "rank 0", 1)
    with rank.span("step 1"):
        clock[0] = 101
        with rank.span("train"):
            clock[0] = 104
        clock[0] = 105
    put_together(tmp_path)
    train, step = events(tmp_path, "X")
    assert (step["name"], step["ts"], step["dur"]) == ("step 1", pytest.approx(100e6), pytest.approx(5e6))
    assert (train["name"], train["ts"], train["dur"]) == ("train", pytest.approx(101e6), pytest.approx(3e6))
    assert (train["pid"], train["tid"]) == (step["pid"], step["tid"]) == (1, 0)
    names, places = events(tmp_path, "M")
    assert names["args"] == {"name": "rank 0"} and places["args"] == {"sort_index": 1}


def test_a_span_that_ends_in_an_error_is_there_too(tmp_path):
    rank = Timeline(tmp_path / "timeline" / "rank_0.jsonl")
    with pytest.raises(ValueError), rank.span("train"):
        raise ValueError
    put_together(tmp_path)
    assert [event["name"] for event in events(tmp_path, "X")] == ["train"]


def test_what_overlaps_has_begin_and_end_of_the_same_number(tmp_path, clock):
    scheduler = Timeline(tmp_path / "timeline" / "scheduler.jsonl", "scheduler")
    first, second = scheduler.overlapping("step 1"), scheduler.overlapping("step 2")
    for clock[0], act in enumerate((first.__enter__, second.__enter__), 200):
        act()
    for clock[0], span in enumerate((first, second), 202):
        span.__exit__(None, None, None)
    put_together(tmp_path)
    found = {(event["id"], event["ph"]): (event["name"], event["ts"]) for event in events(tmp_path, "b", "e")}
    assert found == {
        (0, "b"): ("step 1", pytest.approx(200e6)),
        (1, "b"): ("step 2", pytest.approx(201e6)),
        (0, "e"): ("step 1", pytest.approx(202e6)),
        (1, "e"): ("step 2", pytest.approx(203e6)),
    }


def test_a_level_is_a_counter(tmp_path):
    scheduler = Timeline(tmp_path / "timeline" / "scheduler.jsonl", "scheduler")
    scheduler.level("engine 0: responses", 8)
    put_together(tmp_path)
    (event,) = events(tmp_path, "C")
    assert (event["name"], event["args"]) == ("engine 0: responses", {"value": 8})


def test_parts_of_a_run_that_was_killed_and_resumed_are_all_there(tmp_path):
    parts = [tmp_path / "timeline" / f"rank_{rank}.jsonl" for rank in (0, 1)]
    for _ in range(2):
        for rank, part in enumerate(parts):
            with Timeline(part, f"rank {rank}", rank + 1).span("train"):
                pass
            with part.open("a") as killed:
                killed.write('{"ph": "X", "na')
    put_together(tmp_path)
    assert [event["pid"] for event in events(tmp_path, "X")] == [1, 1, 2, 2]


def test_without_the_key_nothing_is_written(tmp_path):
    knobs = {"data": {"train_files": "x.jsonl"}, "actor_rollout_ref": {"model": {"path": "m"}}}
    with make_timeline(config_from_dict(knobs), tmp_path, "rank 0", 1).span("train"):
        pass
    assert list(tmp_path.iterdir()) == [] and put_together(tmp_path) is None
    with make_timeline(config_from_dict(knobs, ["trainer.timeline=true"]), tmp_path, "rank 0", 1).span("train"):
        pass
    assert (tmp_path / "timeline" / "rank_0.jsonl").exists()


def test_the_command_puts_a_run_together_or_says_that_it_has_none(tmp_path, capsys):
    assert main([]) == 2
    assert main([str(tmp_path)]) == 2
    assert "trainer.timeline=true" in capsys.readouterr().err
    with Timeline(tmp_path / "timeline" / "rank_0.jsonl").span("train"):
        pass
    command = [sys.executable, "-m", "rlhf_mp.observe.timeline", tmp_path]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == f"{tmp_path}/timeline.json\n"
