"""Processes as /proc shows them: who is alive, who started whom, who belongs to a job, and how to end them."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

TERM_S = 3.0  # from SIGTERM to SIGKILL
LIMIT_S = 15.0  # what SIGKILL cannot end by then is given up
LAUNCHERS = {"deepspeed", "deepspeed.launcher.launch", "torchrun", "torch.distributed.run"}


def stat(pid: int) -> list[str]:
    """``/proc/<pid>/stat`` from its third field on: state, parent, ... Empty once the process is reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def start_time(pid: int) -> str:
    """Clock ticks from boot to start; with the pid it names a process for good."""
    return stat(pid)[19]


def is_alive(pid: int, started: str) -> bool:
    fields = stat(pid)
    return bool(fields) and fields[0] not in "ZX" and fields[19] == started


def exit_status(pid: int) -> int | None:
    """Exit code of a dead process, or minus its signal; None where its parent has collected it already."""
    fields = stat(pid)
    return os.waitstatus_to_exitcode(int(fields[49])) if fields and fields[0] == "Z" else None


def find_launchers(pid: int) -> Iterator[int]:
    """The launcher's processes above a rank. A killed one leaves the ranks running (SIGTERM to ``deepspeed`` does)."""
    while pid := int(stat(pid)[1]):
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        if LAUNCHERS.isdisjoint(os.path.basename(argument) for argument in arguments[:4]):
            return
        yield pid


def belonging_to(mark: str, pipes: set[str]) -> set[int]:
    """Processes started with ``mark`` ("NAME=value") in their environment, or that hold one of ``pipes``.

    The environment shown is the one a process was started with, so a fork without exec has none of the marks its
    parent set later; but it holds its parent's pipes.
    """
    return {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _belongs(pid, mark, pipes)}


def _belongs(pid: int, mark: str, pipes: set[str]) -> bool:
    try:
        if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return True
        return any(os.readlink(entry) in pipes for entry in os.scandir(f"/proc/{pid}/fd"))
    except OSError:  # another user's, or gone meanwhile
        return False


def end(remaining: Callable[[], set[int]]) -> tuple[set[int], set[int]]:
    """SIGTERM, later SIGKILL, to all of ``remaining()`` until there are none.

    Returns:
        (All pids that were signalled, those that are still there.)
    """
    signalled: dict[int, signal.Signals] = {}
    began = time.monotonic()
    while (pids := remaining()) and (elapsed := time.monotonic() - began) < LIMIT_S:
        strength = signal.SIGTERM if elapsed < TERM_S else signal.SIGKILL
        for pid in pids:
            if signalled.get(pid) != strength:
                signalled[pid] = strength
                try:
                    os.kill(pid, strength)
                except ProcessLookupError:  # ended by itself
                    pass
        time.sleep(0.1)
    return set(signalled), pids
