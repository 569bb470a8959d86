"""Run one side of a benchmark in its own session, with a log, and leave nothing behind."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRAIN = ROOT / "launch" / "train.py"
LOG_TAIL = 30
SHUTDOWN_S = 30
LOOK_EVERY_S = 1.0


def run_logged(command: list[str], log: Path, processes: int, look: Callable[[], None] = lambda: None) -> None:
    """Run ``command`` with the cores shared out among ``processes``; its output goes to ``log``.

    Args:
        look: called every second while it runs.

    Raises:
        RuntimeError: it failed; with the end of the log.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # scripts import this package
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(paths)}
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # of `timeout`, `kill` or Slurm: like Ctrl-C
    with log.open("wb") as file:
        # a session of its own: signals to a launcher's pid would leave its ranks running
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
        try:
            code = None
            while code is None:
                look()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(LOOK_EVERY_S)
        except BaseException:  # Ctrl-C: end the whole session before anything else happens
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(SHUTDOWN_S)
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL:])
        raise RuntimeError(f"{' '.join(command)} ended with {code}; the end of {log}:\n{tail}")


def run_ranks(num_ranks: int, log: Path, *words: object, look: Callable[[], None] = lambda: None) -> None:
    """``run_logged`` of a script and its arguments on so many ranks, which meet at a port of their own."""
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", str(num_ranks)]
    run_logged([*launcher, "--master_port", str(free_port()), *map(str, words)], log, num_ranks, look)


def train(
    config: Path, overrides: Sequence[str], num_ranks: int, log: Path, look: Callable[[], None] = lambda: None
) -> None:
    """A training run as users start it."""
    run_ranks(num_ranks, log, TRAIN, "--config", config, *overrides, look=look)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
