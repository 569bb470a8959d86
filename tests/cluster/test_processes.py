"""How a process ended, as its guard reads it."""

import os
import platform
import signal
import subprocess
from collections.abc import Iterator

import pytest

from rlhf_mp.cluster.first_failure import wait_until
from rlhf_mp.cluster.processes import collected_status, exit_status, pending_signals, stat

STOPPED, DEAD = "T", "Z"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen]:
    """A child that nobody waits for until the test is over."""
    asked = [signal.SIGINT, signal.SIGTERM]  # a shell in the background starts its commands deaf to Ctrl-C
    process = subprocess.Popen(["sleep", "60"], preexec_fn=lambda: [signal.signal(s, signal.SIG_DFL) for s in asked])
    yield process
    process.kill()
    process.wait()


def reaches(process: subprocess.Popen, state: str) -> bool:
    return wait_until(lambda: stat(process.pid)[0] == state, 5)


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_the_signal_that_ended_it(sleeper, ending):
    pidfd = os.pidfd_open(sleeper.pid)
    assert exit_status(sleeper.pid, pidfd) is None
    sleeper.send_signal(ending)
    assert reaches(sleeper, DEAD) and exit_status(sleeper.pid, pidfd) == -ending
    os.close(pidfd)


@pytest.mark.parametrize("request_to_end", [signal.SIGINT, signal.SIGTERM])
def test_a_request_that_a_kill_overtook_is_what_ended_it(sleeper, request_to_end):
    sleeper.send_signal(signal.SIGSTOP)
    assert reaches(sleeper, STOPPED)
    sleeper.send_signal(request_to_end)  # stays undelivered, as in a process that is not scheduled in between
    sleeper.send_signal(signal.SIGUSR1)
    assert pending_signals(sleeper.pid) == {request_to_end, signal.SIGUSR1}
    sleeper.kill()
    pidfd = os.pidfd_open(sleeper.pid)
    assert reaches(sleeper, DEAD) and exit_status(sleeper.pid, pidfd) == -request_to_end
    os.close(pidfd)


@pytest.mark.parametrize(("command", "status"), [("exit 7", 7), ("kill -TERM $$", -15), ("kill -KILL $$", -9)])
def test_one_that_its_parent_has_collected(command, status):
    """As a launcher does with its ranks when it is interrupted, often before their guards have looked."""
    process = subprocess.Popen(["sh", "-c", f"read go; {command}"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(process.pid)
    assert collected_status(pidfd) is None  # alive
    process.communicate(b"go\n")
    kernel = tuple(map(int, platform.release().split(".")[:2]))
    assert exit_status(process.pid, pidfd) == (status if kernel >= (6, 15) else None)
    assert pending_signals(process.pid) == set()
    os.close(pidfd)
