"""Where every thread of a rank is, written into its log: when a part of the run hangs, or for whoever sends SIGUSR1."""

import contextlib
import faulthandler
import os
import signal
import time
from pathlib import Path

from rlhf_mp.cluster.local_ranks import local_ranks
from rlhf_mp.cluster.processes import is_alive

REQUEST = signal.SIGUSR1
WRITE_S = 1.0  # until a rank has written; whoever ends it waits so long


def write_on_request(log: Path) -> None:
    """Of this process; also while its main thread is inside a collective that never returns."""
    faulthandler.register(REQUEST, log.open("a"), all_threads=True)


def request_stacks(tmp: Path) -> None:
    """Of every rank of the job on this host. Ranks mostly hang together: the first to ask asks for all."""
    with contextlib.suppress(FileExistsError, FileNotFoundError):
        (tmp / "stacks").touch(exist_ok=False)
        for _, pid, started in local_ranks(tmp):
            if is_alive(pid, started):
                os.kill(pid, REQUEST)
    time.sleep(WRITE_S)
