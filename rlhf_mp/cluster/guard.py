"""Nothing of a job outlives it, and the first thing that died is named.

``start_guard`` runs first in every rank. It starts a small process, the guard (``watch.py``), which signals to the job
do not reach. The guard carries the rank's output to its log, so the last words of a killed rank are kept. When the
rank is gone, it reports a death that nobody announced and ends what is left of the job on this host: whatever was
started with the job's ``RLHF_MP_JOB`` in its environment.
"""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

from rlhf_mp.cluster.alert import send_alert
from rlhf_mp.cluster.first_failure import FIRST_FAILURE, claim, claimed_meanwhile, failure_text
from rlhf_mp.cluster.local_ranks import register
from rlhf_mp.cluster.processes import find_launchers, start_time
from rlhf_mp.cluster.shared_memory import allreduce_buffers
from rlhf_mp.cluster.stacks import write_on_request
from rlhf_mp.cluster.watch import Watched

INHERITED = ("RLHF_MP_JOB", "RLHF_MP_TMP", "SPT_NOENV")
"""Whoever builds a child's environment from nothing copies these. Without SPT_NOENV, setproctitle (Ray, SGLang) wipes
the environment that /proc shows, and the guard could not recognize the process."""

OTHER_LAUNCHERS = {"LOCAL_SIZE", "TORCHELASTIC_RUN_ID"}
"""Set by deepspeed and torchrun: inside a Slurm step these are the ranks' parents."""

BOOT = "import sys; sys.path.append(sys.argv[1]); from rlhf_mp.cluster.watch import main; main(sys.argv[2])"


@dataclass(frozen=True)
class Guard:
    """The rank's side. ``console`` is what stdout was, for progress bars: stdout itself is a pipe now."""

    run_dir: Path
    tmp: Path  # private to the job on this host, short enough for Ray's sockets, removed at the end
    log: Path
    console: TextIO
    farewell_fd: int
    alert: str | None = None  # a command, see alert.py
    speaking: threading.Lock = field(default_factory=threading.Lock)

    def farewell(self, exit_code: int) -> None:
        """Say that this rank ends knowingly. Without it, any end but exit code 0 is reported as a death."""
        os.write(self.farewell_fd, f"{exit_code}\n".encode())

    def report(self, what: str, message: str, log: Path | None = None, *, witnessed: bool = False) -> bool:
        """Tell the user what failed, unless something else failed first: then False, and nothing is printed.

        Args:
            witnessed: a death seen with our own eyes. Anything else may only follow from one, and waits for it.
        """
        earlier = not witnessed and claimed_meanwhile(self.run_dir)
        with self.speaking:  # it may be another thread of ours that speaks: do not return, and exit, under it
            if earlier or not claim(self.run_dir, what, os.getpid(), message):
                return False
            self.console.write(failure_text(what, message, log))
            self.console.flush()
            send_alert(self.alert, what, message, self.run_dir)
        return True


def start_guard(rank: int, run_dir: Path, *, several_hosts: bool = False, alert: str | None = None) -> Guard:
    """Start this rank's guard, before any heavy import.

    From here on stdout and stderr go to ``<run_dir>/logs/rank_<rank>.log``, rank 0's to the old stdout as well.
    WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be in the environment; RLHF_MP_JOB and RLHF_MP_TMP are added to it.

    Raises:
        OSError: the job's folder in /tmp cannot be made, or belongs to another user.
    """
    run_dir, pid, job = run_dir.resolve(), os.getpid(), job_id()
    log = run_dir / "logs" / f"rank_{rank}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    write_on_request(log)
    if rank == 0:  # left by an earlier run
        (run_dir / FIRST_FAILURE).unlink(missing_ok=True)
    # Ended between the making of its folder and the start of its guard, a rank would leave the folder behind.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    tmp = register(job, f"{rank}.{pid}.{start_time(pid)}")

    launchers = [os.pidfd_open(launcher) for launcher in find_launchers(pid)]
    farewell_read, farewell_write = os.pipe()
    output_read, output_write = os.pipe()
    watched = Watched(
        number=rank, host=socket.gethostname() if several_hosts else "", pid=pid, started=start_time(pid),
        job=job, tmp=str(tmp), run_dir=str(run_dir), log=str(log),
        buffers=allreduce_buffers(),
        alive_fd=os.pidfd_open(pid), farewell_fd=farewell_read, output_fd=output_read, launcher_fds=launchers,
        alert=alert,
    )  # fmt: skip
    fds = [watched.alive_fd, farewell_read, output_read, *launchers]
    package_root = str(Path(__file__).parents[2])
    command = [sys.executable, "-I", "-S", "-c", BOOT, package_root, json.dumps(asdict(watched))]
    subprocess.run(command, pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True, check=True)
    for fd in fds:
        os.close(fd)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.environ.update(RLHF_MP_JOB=job, RLHF_MP_TMP=str(tmp), SPT_NOENV="1")

    sys.stdout.flush()
    console = open(os.dup(1), "w", encoding="utf-8")
    os.dup2(output_write, 1)
    os.dup2(output_write, 2)
    os.close(output_write)
    sys.stdout.reconfigure(line_buffering=True)
    return Guard(run_dir, tmp, log, console, farewell_write, alert)


def job_id() -> str:
    """The same for all ranks that one launcher started on this host, another for every launch."""
    if "SLURM_STEP_ID" in os.environ and OTHER_LAUNCHERS.isdisjoint(os.environ):  # srun's tasks have no common parent
        key = " ".join(os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"))
    else:
        launch = os.getppid() if int(os.environ["WORLD_SIZE"]) > 1 else os.getpid()
        key = f"{launch} {start_time(launch)} {os.environ['MASTER_PORT']}"
    return hashlib.blake2b(key.encode(), digest_size=4).hexdigest()
