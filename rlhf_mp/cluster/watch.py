"""The guard: one small process beside each rank, in a session of its own, standard library only. See ``guard.py``.

It must not be a child of the rank: the deepspeed launcher ends a failed job's process trees and waits for them.
"""

import contextlib
import json
import math
import os
import select
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from rlhf_mp.cluster.alert import send_alert
from rlhf_mp.cluster.first_failure import FIRST_FAILURE, GRACE_S, claim, claimed_meanwhile, failure_text, wait_until
from rlhf_mp.cluster.local_ranks import local_ranks
from rlhf_mp.cluster.processes import REQUESTS, TERM_S, belonging_to, end, exit_status, is_alive
from rlhf_mp.cluster.shared_memory import NOTED, note_files, remove_files
from rlhf_mp.cluster.stacks import REQUEST, WRITE_S

UNKNOWN_GRACE_S = 2 * GRACE_S  # who knows how its rank ended speaks before who does not
PATIENCE_S = 3.0  # other ranks may end by themselves or by their launcher
CRASHES = {-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE}  # follow from nothing else
INTERRUPTS = {-request for request in REQUESTS}
LOOK_EVERY_S = 5.0  # for shared memory
FAILED_ELSEWHERE_S = 5.0  # ranks of other hosts mostly end by themselves or by their launcher


@dataclass(frozen=True)
class Watched:
    """What a guard is told about its rank."""

    number: int
    host: str  # its name where the job has several; empty: there is only this one
    pid: int
    started: str
    job: str
    tmp: str
    run_dir: str
    log: str
    buffers: str  # how the names of DeepSpeed's shared-memory files begin
    alive_fd: int  # pidfd: readable when the rank is gone
    farewell_fd: int
    output_fd: int
    launcher_fds: list[int]  # pidfds
    alert: str | None  # a command, see alert.py


@dataclass(frozen=True)
class Ending:
    """How the rank ended."""

    status: int | None  # exit code, or minus the signal; None: see ``exit_status``
    farewell: int | None  # the exit code it announced
    orphaned: bool = False  # its launcher died first, so the guard ended it

    @property
    def failed(self) -> bool:
        return self.orphaned or (self.farewell if self.status is None else self.status) != 0

    @property
    def announced(self) -> bool:
        return bool(self.farewell)

    def describe(self, name: str) -> tuple[str, str]:
        """(what failed, how)."""
        if self.orphaned:
            return "interrupted", f"the launcher of {name} was ended"
        if self.status is None:
            return name, "died without a word"
        if self.status > 0:
            return name, f"ended with exit code {self.status}"
        cause = signal.Signals(-self.status).name
        if self.status in INTERRUPTS:
            return "interrupted", f"{name} was ended by {cause}"
        hint = "; if nobody did that, the host ran out of memory (see dmesg)" if cause == "SIGKILL" else ""
        return name, f"died without a word, killed by {cause}{hint}"


class Watch:
    """One rank, from its start until nothing is left of it."""

    def __init__(self, rank: Watched):
        self.rank, self.run_dir, self.tmp = rank, Path(rank.run_dir), Path(rank.tmp)
        self.mark = f"RLHF_MP_JOB={rank.job}"
        self.next_look = 0.0
        self.old_failure = failure_file(self.run_dir)  # an earlier run's, which rank 0 has yet to remove
        self.failed_elsewhere_at = math.inf
        self.log_fd = os.open(rank.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.pipes = {os.readlink(f"/proc/self/fd/{fd}") for fd in (rank.farewell_fd, rank.output_fd)}
        for fd in (rank.farewell_fd, rank.output_fd):
            os.set_blocking(fd, False)

    def run(self) -> None:
        ending = self.follow()
        try:
            self.note_shared_memory()
            if ending.failed and not ending.announced:
                self.report(ending)
        finally:
            self.clean_up(ending.failed)
            self.carry_output()

    def follow(self) -> Ending:
        """Carry output until the rank is gone. If a launcher goes first, or another host reports a failure, end it."""
        poll, kill_at, launcher_died = select.poll(), math.inf, False
        for fd in (self.rank.alive_fd, self.rank.output_fd, *self.rank.launcher_fds):
            poll.register(fd, select.POLLIN)
        while True:
            self.look_now_and_then()
            if self.rank.host and failure_file(self.run_dir) not in (None, self.old_failure):
                self.failed_elsewhere_at = min(self.failed_elsewhere_at, time.monotonic())
            ready = {fd for fd, _ in poll.poll(1000)}
            if self.rank.alive_fd in ready:
                # at once: it may be lost when the launcher collects it
                status = exit_status(self.rank.pid, self.rank.alive_fd)
                self.carry_output()
                return Ending(status, self.read_farewell(), orphaned=launcher_died)
            for fd in ready.intersection(self.rank.launcher_fds):
                poll.unregister(fd)
                launcher_died, kill_at = True, time.monotonic() + TERM_S
                self.send(signal.SIGTERM)
            if kill_at == math.inf and time.monotonic() > self.failed_elsewhere_at + FAILED_ELSEWHERE_S:
                self.send(REQUEST)  # something may hang, and this be the cause
                time.sleep(WRITE_S)
                kill_at = time.monotonic() + TERM_S
                self.send(signal.SIGTERM)
            if time.monotonic() > kill_at:
                self.send(signal.SIGKILL)
            if self.rank.output_fd in ready and not self.carry_output():
                poll.unregister(self.rank.output_fd)  # closed by the rank and all that it started

    def send(self, number: signal.Signals) -> None:
        """To the rank, which may end at any time."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.rank.alive_fd, number)

    def carry_output(self) -> bool:
        """Copy what the rank has written so far, at most a pipe full; False once nobody can write any more."""
        try:
            data = os.read(self.rank.output_fd, 1 << 16)
        except BlockingIOError:
            return True
        write(self.log_fd, data)
        if self.rank.number == 0:
            write(1, data)
        return data != b""

    def read_farewell(self) -> int | None:
        try:
            words = os.read(self.rank.farewell_fd, 100).split()
        except BlockingIOError:  # something that the rank forked holds the pipe open
            return None
        return int(words[0]) if words else None

    def look_now_and_then(self) -> None:
        """One guard per host, that of its lowest rank, notes the job's shared memory: its owners may die any time."""
        if time.monotonic() < self.next_look:
            return
        self.next_look = time.monotonic() + LOOK_EVERY_S
        if self.rank.number == min(number for number, _, _ in self.registered_ranks()):
            self.note_shared_memory()

    def note_shared_memory(self) -> None:
        note_files(self.tmp, self.job_processes())

    def job_processes(self) -> set[int]:
        return belonging_to(self.mark, self.pipes) - {os.getpid()}

    def report(self, ending: Ending) -> None:
        where = f" on {self.rank.host}" if self.rank.host else ""
        what, message = ending.describe(f"rank {self.rank.number} (pid {self.rank.pid}{where})")
        grace_s = UNKNOWN_GRACE_S if ending.status is None else GRACE_S
        if ending.status not in CRASHES and claimed_meanwhile(self.run_dir, grace_s):
            return
        if claim(self.run_dir, what, self.rank.pid, message):
            log = None if what == "interrupted" else Path(self.rank.log)
            write(1, failure_text(what, message, log).encode())
            if what != "interrupted":
                send_alert(self.rank.alert, what, message, self.run_dir)

    def clean_up(self, failed: bool) -> None:
        """End the job on this host, unless this rank ended well and is not the last one."""
        ranks = self.registered_ranks()

        def alive() -> set[int]:
            return {pid for _, pid, started in ranks if is_alive(pid, started)}

        if failed:
            wait_until(lambda: not alive(), PATIENCE_S)
        elif alive():
            return

        def remaining() -> set[int]:
            self.note_shared_memory()  # some is made only while a process is ending
            return alive() | self.job_processes()

        ended, left = end(remaining)
        if left:
            write(1, f"processes {sorted(left)} could not be ended\n".encode())
        noted = {path.name for path in (self.tmp / NOTED).glob("*")}
        remove_files(noted, torch_pids=ended | {pid for _, pid, _ in ranks}, prefix=self.rank.buffers)
        shutil.rmtree(self.tmp, ignore_errors=True)  # another guard of this job may be removing it too

    def registered_ranks(self) -> set[tuple[int, int, str]]:
        """This host's; only our own when another guard has cleaned up already."""
        return {(self.rank.number, self.rank.pid, self.rank.started)} | local_ranks(self.tmp)


def failure_file(run_dir: Path) -> tuple[int, int] | None:
    """Which failure is written down; None: none is."""
    try:
        found = (run_dir / FIRST_FAILURE).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def write(fd: int, data: bytes) -> None:
    """A closed terminal or a full disk must not keep the guard from its work."""
    try:
        os.write(fd, data)
    except OSError:
        pass


def main(watched: str) -> None:
    """Detach from the rank, then watch it. ``watched``: a ``Watched`` as JSON."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    watch = Watch(Watched(**json.loads(watched)))
    if os.fork() == 0:
        watch.run()
    os._exit(0)
