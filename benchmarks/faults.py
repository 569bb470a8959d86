"""Faults done to the engines of a running job, from outside, as a machine or a person would do them."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

PAUSE_S, SLOW_S, NAP_S = 3.0, 8.0, 0.2


def server(run_dir: Path, engine: int) -> int | None:
    """The newest server of an engine: the leader of a process group that writes to the engine's log. None: there is
    none now."""
    logs = {run_dir / "logs" / f"engine_{engine}.log", *run_dir.glob(f"logs/engine_{engine}_restart_*.log")}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if Path(os.readlink(process / "fd" / "1")) in logs and os.getpgid(int(process.name)) == int(process.name):
                found.append(int(process.name))
        except OSError:  # not ours, or gone meanwhile
            pass
    return max(found, default=None)


def kill(group: int) -> None:
    os.killpg(group, signal.SIGKILL)


def hang(group: int) -> None:
    """For good: it has to be noticed."""
    os.killpg(group, signal.SIGSTOP)


def pause(group: int) -> None:
    """Shorter than any time limit."""
    os.killpg(group, signal.SIGSTOP)
    time.sleep(PAUSE_S)
    os.killpg(group, signal.SIGCONT)


def slow(group: int) -> None:
    """Half of its time it does nothing."""
    for _ in range(int(SLOW_S / NAP_S / 2)):
        os.killpg(group, signal.SIGSTOP)
        time.sleep(NAP_S)
        os.killpg(group, signal.SIGCONT)
        time.sleep(NAP_S)


FAULTS: dict[str, Callable[[int], None]] = {"kill": kill, "hang": hang, "pause": pause, "slow": slow}
