"""What the soak test compares, by hand; and its faults, on a real process group."""

import signal
import subprocess
import sys
import time
from collections import Counter

import torch

from benchmarks.faults import hang, kill, pause, server
from benchmarks.soak import compared, prompts_of, table, too_old
from rlhf_mp.data.step_batch import StepBatch
from rlhf_mp.data.types import TokenBatch


def part(tokens: list[list[int]], mask: list[list[int]], versions: list[int]) -> StepBatch:
    chosen = torch.tensor(mask, dtype=torch.float32)
    none = torch.zeros(len(tokens))
    batch = TokenBatch(torch.tensor(tokens), chosen, none, none.long(), none.long(), torch.zeros_like(chosen))
    return StepBatch(step=1, dp_rank=0, dp_size=1, batch=batch, updates={}, skipped={}, versions=versions)


def test_a_prompt_is_what_comes_before_the_mask_on_all_ranks():
    first = part([[1, 2, 7, 8], [1, 2, 9, 0]], [[0, 0, 1, 1], [0, 0, 1, 0]], [0, 0])
    second = part([[3, 7, 0], [1, 2, 5]], [[0, 1, 0], [0, 0, 1]], [0, 0])
    assert prompts_of([first, second]) == Counter({(1, 2): 3, (3,): 1})


def test_what_is_missing_and_what_is_there_too_often_are_counted_step_by_step():
    expected = {1: Counter({(1,): 2, (2,): 2}), 2: Counter({(3,): 2})}
    assert compared(expected, expected) == {"lost": 0, "twice": 0}
    # (2,) came in step 2 in the place of (3,), and again in a step that should not be
    found = {1: Counter({(1,): 2}), 2: Counter({(2,): 2}), 3: Counter({(2,): 1})}
    assert compared(expected, found) == {"lost": 4, "twice": 3}


def test_a_response_may_be_as_old_as_allowed_and_no_older():
    batches = {step: [part([[1, 2]], [[0, 1]], [version])] for step, version in [(1, 0), (2, 0), (3, 0), (4, 3)]}
    assert [too_old(batches, k) for k in (0, 1, 2)] == [2, 1, 0]


def test_the_undisturbed_run_has_nothing_to_be_compared_with():
    run = {"max_staleness": 1, "faults": {"kill": 2}, "seconds": 9.0, "steps": 3, "restarts": 2}
    run |= {"accuracy_first": 0.1, "accuracy_last": 0.9, "token_staleness_max": 1.0, "too_old": 0}
    assert table([run]).rows[0][-2:] == [None, None]


def test_the_newest_server_of_an_engine_is_found_stopped_and_killed(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "engine_0.log").touch()
    assert server(tmp_path, 0) is None
    with open(tmp_path / "logs" / "engine_0_restart_1.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"], stdout=log, start_new_session=True
        )
    try:
        assert server(tmp_path, 0) == process.pid and server(tmp_path, 1) is None
        hang(process.pid)
        time.sleep(0.1)
        assert state(process.pid) == "T"
    finally:
        kill(process.pid)
    assert process.wait() == -signal.SIGKILL
    assert server(tmp_path, 0) is None


def test_after_a_pause_it_goes_on(monkeypatch):
    monkeypatch.setattr("benchmarks.faults.PAUSE_S", 0.1)
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    pause(process.pid)
    assert state(process.pid) in "SR"
    kill(process.pid)
    process.wait()


def state(pid: int) -> str:
    """The letter that ps shows."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0]
