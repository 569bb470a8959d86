"""Programs that try everything, in the real sandbox."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlhf_mp.cluster.first_failure import wait_until
from rlhf_mp.config.reward import CodeTerm
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.rewards.base import Failure, Response, Setting
from rlhf_mp.rewards.code import CodeReward, code_in, unit_tests
from rlhf_mp.rewards.sandbox import Limits, Sandbox

LIMITS = Limits(timeout_s=1.0, memory_mb=256, file_mb=4, max_processes=16)


def namespaces_work() -> bool:
    try:
        asyncio.run(Sandbox("namespaces", LIMITS).start())
    except RuntimeError:
        return False
    return True


@pytest.fixture(scope="module", params=["namespaces", "rlimits"])
def isolation(request):
    if request.param == "namespaces" and not namespaces_work():
        pytest.skip("this machine allows no unprivileged user namespaces")
    return request.param


def outcome(isolation, program, stdin="", limits=LIMITS):
    return asyncio.run(Sandbox(isolation, limits).run(program, stdin))


def test_it_says_what_protects(isolation):
    said = asyncio.run(Sandbox(isolation, LIMITS).start())
    assert said.startswith({"namespaces": "user, mount, network, process", "rlimits": "NOT confined"}[isolation])
    assert "'memory_mb': 256" in said


def test_a_program_reads_and_prints(isolation):
    ran = outcome(isolation, "print(int(input()) + 1)", "41\n")
    assert (ran.exit_code, ran.output, ran.errors, ran.timed_out) == (0, "42\n", "", False)


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("x = bytearray(1 << 30)", "MemoryError"),
        ("open('f', 'wb').write(b'x' * (8 << 20))", "File too large"),
        ("raise SystemExit(3)", None),
        ("import os; os.kill(os.getpid(), 9)", None),
        ("import os; os.kill(-1, 9)", None),
    ],
)
def test_memory_files_and_crashes_end_the_program_alone(program, error):
    if not namespaces_work():
        pytest.skip("os.kill(-1) must not be tried outside a process namespace")
    ran = outcome("namespaces", program)
    assert ran.exit_code != 0 and not ran.timed_out
    assert error is None or error in ran.errors


def running() -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if "program.py" in (p.info["cmdline"] or [])]


HANGS = {
    "sleep": "import time; time.sleep(1000)",
    "loop": "while True: pass",
    "daemon": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(1000)\n"
    "    time.sleep(1000)\ntime.sleep(1000)",
    "deaf": "import signal, time\nfor s in (1, 2, 3, 14, 15): signal.signal(s, signal.SIG_IGN)\ntime.sleep(1000)",
}


@pytest.mark.parametrize("how", HANGS)
def test_a_program_that_hangs_is_ended_with_everything_it_started(isolation, how):
    started = time.monotonic()
    ran = outcome(isolation, HANGS[how])
    assert ran.timed_out and 0.9 < time.monotonic() - started < 9
    assert running() == []


def test_what_a_finished_program_left_running_ends_too(isolation):
    ran = outcome(
        isolation, "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\nprint('done')"
    )
    assert (ran.exit_code, ran.output) == (0, "done\n")
    assert running() == []


@pytest.mark.parametrize(
    "program",
    [
        "import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
        "open({file!r}).read()",
        "open('/etc/passwd').read()",
        "import os; os.listdir('/proc/1')",
        "open('/usr/planted', 'w')",
        "import ctypes; assert ctypes.CDLL(None).mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None) == 0",
        "import os; os.setuid(0)",
        "import os; os.chroot('/tmp')",
        "import os\nfor _ in range(100):\n    if os.fork() == 0: __import__('time').sleep(9)",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
    ],
)
def test_no_network_no_files_no_privileges_no_more_processes(program, tmp_path):
    if not namespaces_work():
        pytest.skip("this machine allows no unprivileged user namespaces")
    secret = tmp_path / "run_file"
    secret.write_text("secret")

    async def run():
        touched = asyncio.Event()
        server = await asyncio.start_server(lambda r, w: touched.set(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        told = program.replace("{port}", str(port)).replace("{file!r}", repr(str(secret)))
        ran = await Sandbox("namespaces", LIMITS).run(told)
        server.close()
        return ran, touched.is_set()

    ran, touched = asyncio.run(run())
    assert ran.exit_code == 1 and "Error" in ran.errors and not ran.timed_out
    assert not touched


def test_a_program_ends_with_whoever_started_it(isolation, tmp_path):
    script = tmp_path / "starts.py"
    script.write_text(
        "import asyncio\nfrom rlhf_mp.rewards.sandbox import Limits, Sandbox\n"
        "limits = Limits(timeout_s=300, memory_mb=256, file_mb=4, max_processes=16)\n"
        f"asyncio.run(Sandbox({isolation!r}, limits).run('import time; time.sleep(300)'))\n"
    )
    own = {"PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path)}  # a killed starter leaves its folder
    starter = subprocess.Popen([sys.executable, script], env=os.environ | own)
    try:
        assert wait_until(running, 60)
    finally:
        starter.kill()
        starter.wait()
    assert wait_until(lambda: not running(), 20)


def test_the_environment_holds_nothing_of_the_runs(isolation, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    ran = outcome(isolation, "import os; print(sorted(os.environ))")
    assert "OPENAI_API_KEY" not in ran.output and "PATH" in ran.output


def score(answer, *responses, **knobs):
    reward = CodeReward(CodeTerm("code", **({"timeout_s": 2.0} | knobs)), Setting())

    async def run():
        await reward.start()
        found = await reward.score(Prompt(0, [1], "?", answer), [Response(text) for text in responses])
        await reward.close()
        return [score.kind if isinstance(score, Failure) else score for score in found]

    return asyncio.run(run())


ASSERTIONS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0"
PAIRS = json.dumps([{"input": "1 2", "output": "3"}, {"input": "2 2", "output": "4\n"}])


def test_the_last_fenced_block_is_tried_by_the_references_assertions(isolation):
    good = "First\n```python\ndef add(a, b): return a\n```\nbetter:\n```python\ndef add(a, b):\n    return a + b\n```"
    bare = "def add(a, b): return a + b"
    wrong = "```\ndef add(a, b): return a - b\n```"
    namespaces = {"isolation": isolation}
    assert score(ASSERTIONS, good, bare, wrong, "no code", "", **namespaces) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_leaving_early_is_not_passing(isolation):
    leave = ["import os; os._exit(0)", "raise SystemExit(0)", "print('passed')\nimport sys; sys.exit()", "exit()"]
    assert score(ASSERTIONS, *leave, isolation=isolation) == [0.0] * 4


def test_input_and_output_are_compared_without_white_space_at_line_ends(isolation):
    right = "a, b = map(int, input().split())\nprint(a + b, '')\nprint()"
    assert score(PAIRS, right, "print(3)", isolation=isolation) == [1.0, 0.0]
    assert score(PAIRS, right, "print(3)", isolation=isolation, partial=True) == [1.0, 0.5]


def test_a_list_of_assertions_counts_one_by_one_when_asked_to(isolation):
    tests = json.dumps(["assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 9", "assert f(4) == 16"])
    half = "def f(x): return x"
    assert score(tests, half, isolation=isolation) == [0.0]
    assert score(tests, half, isolation=isolation, partial=True) == [0.5]


def test_a_row_without_tests_is_a_failure_not_a_wrong_answer():
    for answer in ("", "[]", '[{"in": 1}]', "{}"):
        assert score(answer, "x", isolation="rlimits") == ["invalid"]


def test_tests_are_joined_unless_each_counts():
    assert unit_tests('["a", {"input": "", "output": ""}, "b"]', split=False) == ["a\nb", {"input": "", "output": ""}]
    assert unit_tests("assert f()", split=True) == ["assert f()"]
    assert code_in("```py\nx\n```") == "x\n" and code_in("x") == "x"
