"""Functions of a user's that do everything wrong, in their real processes."""

import asyncio
import time

import psutil
import pytest

from rlhf_mp.config.reward import FunctionTerm
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.errors import RewardError
from rlhf_mp.rewards.base import Failure, Response, Setting
from rlhf_mp.rewards.function import FunctionReward

FUNCTIONS = """
import asyncio, os, signal, socket, time
import numpy

kept = []

def length(responses, *, prompt, answer, source, scale=1):
    assert (prompt, answer, source) == ("?", "truth", "mine")
    return [scale * len(text) for text in responses]

async def slowly(responses, **row):
    await asyncio.sleep(0.01)
    return numpy.float32([len(text) for text in responses])

def misbehave(responses, **row):
    what = responses[0]
    if what == "raise":
        raise ValueError("no such thing")
    if what == "hang":
        while True:
            pass
    if what == "hang, deaf":
        signal.setitimer(signal.ITIMER_REAL, 0)
        time.sleep(1000)
    if what == "leak":
        while True:
            kept.append(bytearray(20_000_000))
    if what == "fork":
        if os.fork() == 0:
            return ["from the child"]
    if what == "fork and hang":
        for _ in range(3):
            if os.fork() == 0:
                time.sleep(1000)
        time.sleep(1000)
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exit":
        raise SystemExit(0)
    if what == "connect":
        socket.create_connection(("127.0.0.1", 1), timeout=1)
    if what == "string":
        return "1.0"
    return [1.0]

not_a_function = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))


def made(name: str, **knobs) -> FunctionReward:
    return FunctionReward(FunctionTerm(f"my_rewards:{name}", **({"timeout_s": 1.0} | knobs)), Setting())


async def scores(reward, *texts):
    found = await reward.score(Prompt(0, [1], "?", "truth", "mine"), [Response(text) for text in texts])
    return [score.kind if isinstance(score, Failure) else score for score in found]


def test_a_function_gets_the_group_the_row_and_its_arguments():
    async def run():
        reward = made("length", args={"scale": 3})
        assert "my_rewards:length runs in 1 process" in await reward.start()
        assert await scores(reward, "a", "bcd") == [3, 9]
        await reward.close()

    asyncio.run(run())


def test_an_async_function_may_return_an_array():
    async def run():
        reward = made("slowly")
        assert await scores(reward, "a", "bcd") == [1.0, 3.0]
        await reward.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("raise", "error"), ("hang", "timeout"), ("hang, deaf", "timeout"), ("leak", "memory"), ("die", "crash"),
        ("exit", "crash"), ("connect", "error"), ("fork and hang", "timeout"),
    ],
)  # fmt: skip
def test_whatever_it_does_fails_its_own_group_and_the_next_one_works(what, kind):
    async def run():
        reward = made("misbehave", memory_mb=256, timeout_s=1.0 if "hang" in what else 30.0)
        assert await scores(reward, what, "another") == [kind, kind]
        assert await scores(reward, "good") == [1.0]
        await reward.close()

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    asyncio.run(run())
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert [child for child in left if "resource_tracker" not in " ".join(child.cmdline())] == []


def test_a_copy_made_by_fork_does_not_answer():
    async def run():
        reward = made("misbehave")
        assert await scores(reward, "fork") == [1.0]
        assert await scores(reward, "good") == [1.0]
        await reward.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "reason"),
    [("my_rewards:nothing", "no attribute 'nothing'"), ("no_such_module:f", "No module named 'no_such_module'")],
)
def test_a_function_that_is_not_there_ends_the_run_at_its_start(name, reason):
    async def run():
        reward = FunctionReward(FunctionTerm(name), Setting())
        try:
            with pytest.raises(RewardError, match=reason):
                await reward.start()
        finally:
            await reward.close()

    asyncio.run(run())


def test_several_groups_are_judged_at_once(tmp_path):
    (tmp_path / "sleepy.py").write_text("import time\ndef f(responses, **row):\n    time.sleep(1)\n    return [1]\n")

    async def run():
        reward = FunctionReward(FunctionTerm("sleepy:f", num_workers=4), Setting())
        await asyncio.gather(*(scores(reward, "x") for _ in range(4)))  # the processes start
        started = time.monotonic()
        await asyncio.gather(*(scores(reward, "x") for _ in range(4)))
        await reward.close()
        return time.monotonic() - started

    assert asyncio.run(run()) < 3  # 4 s one after the other
