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

from rlhf_mp.config.reward import MathTerm
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.rewards.base import Failure, Response, Setting
from rlhf_mp.rewards.math import MathReward, final_answer, last_boxed

GSM8K = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k" / "train.jsonl"
FOREVER = r"\boxed{10^{10^{10}}}"  # one C call of hours


def made(timeout_s: float = 5.0) -> MathReward:
    return MathReward(MathTerm("math", timeout_s=timeout_s), Setting())


def close(reward: MathReward) -> None:
    asyncio.run(reward.close())


@pytest.fixture(scope="module")
def judge():
    reward = made()
    yield reward
    close(reward)


def score(reward, answer, *responses):
    """Scores, or the kinds of failures."""
    found = asyncio.run(reward.score(Prompt(0, [1], "?", answer), [Response(text) for text in responses]))
    return [score.kind if isinstance(score, Failure) else score for score in found]


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


@pytest.mark.parametrize(
    "answer, responses",
    [
        ("#### 42", [r"\boxed{42}", "#### 42", "The answer is $42.", "The answer is 42.", "So it is **42**."]),
        ("#### 42", ["Final Answer: 42 apples (of 50)", "The answer is $42 per day for 7 days.", r"\boxed{x = 42}"]),
        ("#### 42", [r"\boxed{\text{42}}", r"\boxed{42.0}", r"The answer is \(42\).", "<answer>42</answer>"]),
        ("#### 42", ["#### **42**", "#### 42\n\nHope it helps with the other 7!", "The answer is\n\n$$x = 42$$"]),
        ("#### 1234567", ["#### 1,234,567", r"\boxed{1{,}234{,}567}", "It is $1,234,567.00.", r"\boxed{\$1,234,567}"]),
        ("#### 3/4", [r"\boxed{\frac{3}{4}}", r"\boxed{\dfrac34}", "#### 0.75", "The answer is 3/4.", r"\boxed{75\%}"]),
        ("#### 1.5", ["#### 1 1/2", r"\boxed{1\frac{1}{2}}", "#### 3/2"]),
        ("#### 25", ["#### 25%", r"\boxed{25\%}", "25 percent of them."]),
        ("#### 25%", ["The answer is 25%.", r"\boxed{0.25}"]),
        ("#### 72", ["#### 72 km", "It takes 72 hours.", r"\boxed{72\text{ clips}}", r"\boxed{72 \text{ km/h}}"]),
        ("#### 72", [r"\boxed{72\ \mathrm{cm}^2}", r"\boxed{72^\circ}", "#### 72 m^2", "#### 72 °", "#### 72 m"]),
        ("#### $18", ["#### $18.00", "Answer: 18 USD", "#### 18 dollars", "18€"]),
        ("#### -3", ["#### -3", r"\boxed{-3}", "The answer is -3."]),
    ],
)
def test_the_formats_that_models_write(judge, answer, responses):
    assert dict(zip(responses, score(judge, answer, *responses), strict=True)) == dict.fromkeys(responses, 1.0)


@pytest.mark.parametrize(
    "answer, responses",
    [
        ("#### 42", ["#### 4.2", "#### 420", "#### -42", "42, no, 43", r"\boxed{42} and then \boxed{24}", "#### 42/2"]),
        ("#### 1234", ["#### 1.234", "#### 12,34,5", r"\boxed{1234x}"]),
        ("#### 3/4", ["#### 4/3", "#### 3", "#### 0.7"]),
        ("#### 1.5", ["#### 1/2", "#### 11/2"]),
        (r"\boxed{12m^2}", ["#### 12", r"\boxed{12}"]),  # algebra, not square metres
    ],
)
def test_and_what_only_looks_like_it(judge, answer, responses):
    assert dict(zip(responses, score(judge, answer, *responses), strict=True)) == dict.fromkeys(responses, 0.0)


@pytest.mark.skipif(not GSM8K.is_file(), reason=f"needs GSM8K's train.jsonl at {GSM8K}")
def test_every_solution_of_gsm8k_is_right_by_itself_and_wrong_for_its_neighbour(judge):
    answers = [json.loads(line)["answer"] for line in GSM8K.read_text().splitlines()]

    async def run():
        own = [await judge.score(Prompt(0, [1], "?", a), [Response(a)]) for a in answers]
        some = answers[::40]
        final = [a.rpartition("#### ")[2] for a in some]
        rewritten = [
            await judge.score(
                Prompt(0, [1], "?", a), [Response(rf"So \boxed{{{f}}}."), Response(f"The answer is ${f}.")]
            )
            for a, f in zip(some, final, strict=True)
        ]
        others = [(a, b) for a, b, f, g in zip(some, some[1:], final, final[1:], strict=False) if f != g]
        wrong = [await judge.score(Prompt(0, [1], "?", a), [Response(b)]) for a, b in others]
        return own, rewritten, wrong

    own, rewritten, wrong = asyncio.run(run())
    assert len(own) == 7473 and all(scores == [1.0] for scores in own)
    assert len(rewritten) == 187 and all(scores == [1.0, 1.0] for scores in rewritten)
    assert len(wrong) > 150 and all(scores == [0.0] for scores in wrong)


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
    started = time.process_time()
    assert last_boxed("\\boxed{" * 100_000) is None  # a quadratic search takes hours
    assert time.process_time() - started < 2


def test_a_comparison_that_never_ends_is_a_failure_and_the_next_one_works():
    reward = made(1.0)
    try:
        assert score(reward, "#### 5", "5.0", FOREVER, "5.0", FOREVER) == [1.0, "timeout", 1.0, "timeout"]
        assert score(reward, "#### 5", "6.0", "5.0") == [0.0, 1.0]
    finally:
        close(reward)


def test_the_deadline_is_for_comparing_not_for_waiting():
    reward = made(1.0)
    try:
        assert score(reward, "#### 5", "5.0") == [1.0]
        time.sleep(1.5)
        assert score(reward, "#### 5", "5.0") == [1.0]
    finally:
        close(reward)


def test_a_slow_comparison_does_not_hold_up_the_event_loop():
    reward = made(1.0)

    async def run():
        ticks = 0
        scoring = asyncio.create_task(reward.score(Prompt(0, [1], "?", "5"), [Response(FOREVER)]))
        while not scoring.done():
            await asyncio.sleep(0.02)
            ticks += 1
        return ticks, await scoring

    try:
        ticks, scores = asyncio.run(run())
    finally:
        close(reward)
    assert [failure.kind for failure in scores] == ["timeout"]
    assert ticks > 10  # at least a second of sleeping 0.02 s: 50 on an idle machine, 1 if the loop was held up


def test_closing_ends_the_worker_process():
    reward = made()
    score(reward, "5", "6")
    (worker,) = (worker.process for worker in reward._pool.workers)
    assert worker.is_alive()
    close(reward)
    assert worker.exitcode == -signal.SIGKILL


def test_closing_without_having_judged_anything_is_fine():
    close(made())


PARENT = """
import asyncio, json, sys, time
from rlhf_mp.config.reward import MathTerm
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.rewards.base import Response, Setting
from rlhf_mp.rewards.math import MathReward
if __name__ == "__main__":
    reward = MathReward(MathTerm("math", timeout_s=4.0), Setting())
    asyncio.run(reward.score(Prompt(0, [1], "?", "5"), [Response("6")]))
    (worker,) = reward._pool.workers
    print(json.dumps(worker.process.pid), flush=True)
    asyncio.run(reward.score(Prompt(0, [1], "?", "5"), [Response(text) for text in sys.argv[1:]]))
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
