"""Processes as /proc shows them: who is alive, who started whom, who belongs to a job, and how to end them."""

import fcntl
import os
import signal
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

TERM_S = 3.0  # from SIGTERM to SIGKILL
REQUESTS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}  # to end
LIMIT_S = 15.0  # what SIGKILL cannot end by then is given up
PIDFD_INFO = struct.Struct("QQ11Ii")  # linux/pidfd.h: what is asked for, ..., exit status
PIDFD_GET_INFO = 0b11 << 30 | PIDFD_INFO.size << 16 | 0xFF << 8 | 11
PIDFD_INFO_EXIT = 1 << 3
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


def exit_status(pid: int, pidfd: int) -> int | None:
    """Exit code of a dead process, or minus its signal; None where its parent has collected it and Linux is older
    than 6.15.

    A busy process may be killed before it has seen an earlier request to end: then that request counts.
    """
    fields = stat(pid)
    if not fields or fields[0] != "Z":
        return collected_status(pidfd)
    status = os.waitstatus_to_exitcode(int(fields[49]))
    asked = REQUESTS.intersection(pending_signals(pid)) if status == -signal.SIGKILL else ()
    return -min(asked) if asked else status


def collected_status(pidfd: int) -> int | None:
    """Of a process whose parent has collected it already; None where the kernel does not tell, or it still lives."""
    info = bytearray(PIDFD_INFO.pack(PIDFD_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, PIDFD_GET_INFO, info)
    except OSError:
        return None
    told, *_, status = PIDFD_INFO.unpack(info)
    return os.waitstatus_to_exitcode(status) if told & PIDFD_INFO_EXIT else None


def pending_signals(pid: int) -> set[int]:
    """Sent to a process and not delivered yet; a dead one keeps them until its parent collects it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return set()
    (line,) = (line for line in lines if line.startswith("ShdPnd"))
    bits = int(line.split()[1], 16)
    return {number for number in signal.valid_signals() if bits >> (number - 1) & 1}


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


def alive_in_group(group: int) -> set[int]:
    """Processes of a process group that have not ended yet."""
    pids = map(int, filter(str.isdigit, os.listdir("/proc")))
    return {pid for pid in pids if (fields := stat(pid)) and fields[2] == str(group) and fields[0] not in "ZX"}


def is_resource_tracker(pid: int) -> bool:
    """Whether it is multiprocessing's own process that tidies up after others."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
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
