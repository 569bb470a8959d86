"""Real math-verify in its real process."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_mp.config.schema import RewardConfig
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.rewards import math_worker
from rlhf_mp.rewards.math import final_answer, last_boxed
from rlhf_mp.rewards.registered import rewards

FOREVER = r"\boxed{10^{10^{10}}}"  # one C call of hours


@pytest.fixture(scope="module")
def judge():
    reward = rewards["math"](RewardConfig(timeout_s=5.0))
    yield reward
    reward.close()


def score(reward, answer, *responses):
    return asyncio.run(reward.score(Prompt(0, [1], "?", answer), responses))


@pytest.mark.parametrize(
    "answer, right, wrong",
    [
        ("48 + 24 = <<48+24=72>>72 clips.\n#### 72", r"so \boxed{72}", r"\boxed{72} no, \boxed{73}"),
        ("#### 72", "#### 72 clips\nI am sure.", "it is 72, so\n#### 27"),
        ("#### 1,234", "That makes 1234 dollars.", "That makes 1.234 dollars."),
        ("#### 18", "#### $18.00", "#### $1800"),
        (r"\frac{1}{2}", r"\boxed{0.5}", r"\boxed{\frac{2}{1}}"),
        ("$x^2 - 1$", r"\boxed{(x-1)(x+1)}", r"\boxed{(x-1)^2}"),
        ("(1,2)", r"\boxed{(1, 2)}", r"\boxed{(2, 1)}"),
        ("7", "First I get 5, then the answer is 7.", "First I get 7, then the answer is 5."),
        ("-3", "#### -3.", "#### 3"),
        (r"Add up: \boxed{2\sqrt{2}}", r"#### \sqrt{8}", "#### 2"),
    ],
)
def test_equal_final_answers_count_one_and_others_nothing(judge, answer, right, wrong):
    assert score(judge, answer, right, wrong, right) == [1.0, 0.0, 1.0]


def test_no_answer_is_a_wrong_answer(judge):
    assert score(judge, "#### 4", "", "I don't know", r"\boxed{}", "####", r"4 is \boxed{ }") == [0.0] * 5
    assert score(judge, "", "", r"\boxed{}", "####", "0") == [0.0] * 4  # an empty reference is matched by nothing


def test_no_responses_need_no_scores(judge):
    assert score(judge, "#### 4") == []


@pytest.mark.parametrize(
    "text, content",
    [
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}} done}", r"\frac{1}{2}"),
        (r"\boxed{\left\{ x \right.} }", r"\left\{ x \right."),  # the escaped brace is not a brace
        (r"\boxed{1} and cut off: \boxed{2", "1"),
        (r"{ never closed \boxed{3}", "3"),
        (r"\boxed{\boxed{4}}", "4"),
        ("nothing", None),
        ("}}{", None),
    ],
)
def test_the_last_complete_box_counts(text, content):
    assert last_boxed(text) == content


def test_a_box_goes_before_a_marked_line_and_a_marked_line_before_nothing():
    assert final_answer("\\boxed{1}\n#### 2").text == "1"
    assert final_answer("#### 1\n#### 2 \nbye").text == "2"
    assert final_answer("1 2 3") is None


def test_a_repeating_response_is_searched_in_linear_time():
    started = time.perf_counter()
    assert last_boxed("\\boxed{" * 100_000) is None  # a quadratic search takes hours
    assert time.perf_counter() - started < 2


def test_a_comparison_that_never_ends_counts_nothing_and_the_next_one_works():
    reward = rewards["math"](RewardConfig(timeout_s=1.0))
    try:
        assert score(reward, "#### 5", "5.0", FOREVER, "5.0", FOREVER) == [1.0, 0.0, 1.0, 0.0]
        assert reward.num_timeouts == 2
        assert score(reward, "#### 5", "6.0", "5.0") == [0.0, 1.0]
        assert reward.num_timeouts == 2
    finally:
        reward.close()


def test_the_deadline_is_for_comparing_not_for_waiting():
    reward = rewards["math"](RewardConfig(timeout_s=1.0))
    try:
        assert score(reward, "#### 5", "5.0") == [1.0]
        time.sleep(1.5)
        assert score(reward, "#### 5", "5.0") == [1.0]
        assert reward.num_timeouts == 0
    finally:
        reward.close()


def test_a_worker_that_cannot_start_is_an_error_and_not_a_wrong_answer(monkeypatch):
    monkeypatch.setattr(math_worker, "serve", os.abort)  # refuses its arguments, so the new process fails at once
    reward = rewards["math"](RewardConfig())
    try:
        with pytest.raises(RuntimeError, match=r"did not start \(exit code 1\)"):
            score(reward, "5", "6")
    finally:
        reward.close()


def test_a_slow_comparison_does_not_hold_up_the_event_loop():
    reward = rewards["math"](RewardConfig(timeout_s=1.0))

    async def run():
        ticks = 0
        scoring = asyncio.create_task(reward.score(Prompt(0, [1], "?", "5"), [FOREVER]))
        while not scoring.done():
            await asyncio.sleep(0.02)
            ticks += 1
        return ticks, await scoring

    try:
        ticks, scores = asyncio.run(run())
    finally:
        reward.close()
    assert scores == [0.0]
    assert ticks > 10  # at least a second of sleeping 0.02 s: 50 on an idle machine, 1 if the loop was held up


def test_closing_ends_the_worker_process():
    reward = rewards["math"](RewardConfig())
    score(reward, "5", "6")
    worker = reward._worker._process
    assert worker.is_alive()
    reward.close()
    assert worker.exitcode == -signal.SIGKILL


def test_closing_without_having_judged_anything_is_fine():
    rewards["math"](RewardConfig()).close()


PARENT = """
import asyncio, json, sys, time
from rlhf_mp.config.schema import RewardConfig
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.rewards.registered import rewards
if __name__ == "__main__":
    reward = rewards["math"](RewardConfig(timeout_s=4.0))
    asyncio.run(reward.score(Prompt(0, [1], "?", "5"), ["6"]))
    print(json.dumps(reward._worker._process.pid), flush=True)
    asyncio.run(reward.score(Prompt(0, [1], "?", "5"), sys.argv[1:]))
    time.sleep(60)
"""


def process_stat(pid):
    """Fields of /proc/PID/stat from the state on; see proc_pid_stat(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def is_running(pid):
    """A zombie has ended, even if nobody has collected it yet."""
    try:
        return process_stat(pid)[0] != "Z"
    except FileNotFoundError:
        return False


def cpu_seconds(pid):
    return int(process_stat(pid)[11]) / os.sysconf("SC_CLK_TCK")


def wait_until(condition, failure):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, failure
        time.sleep(0.05)


@pytest.mark.parametrize("responses", [[], [FOREVER]], ids=["idle", "busy"])
def test_the_worker_does_not_outlive_a_killed_parent(tmp_path, responses):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.Popen([sys.executable, script, *responses], stdout=subprocess.PIPE, env=environment)
    try:
        worker = json.loads(parent.stdout.readline())
        before = cpu_seconds(worker)
        if responses:
            wait_until(lambda: cpu_seconds(worker) > before + 0.2, "the worker does not compute")
        assert is_running(worker)
    finally:
        parent.kill()
        parent.communicate()
    wait_until(lambda: not is_running(worker), "the worker is still there")


def test_importing_rewards_is_cheap():
    """A configuration is checked before torch or sympy are touched."""
    code = "import sys, rlhf_mp.rewards.registered; assert not {'torch', 'sympy', 'transformers'} & set(sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
