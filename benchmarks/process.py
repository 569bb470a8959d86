"""Run one side of a benchmark in its own session, with a log, and leave nothing behind."""

import os
import signal
import subprocess
from pathlib import Path

LOG_TAIL = 30
SHUTDOWN_S = 30


def run_logged(command: list[str], log: Path, processes: int) -> None:
    """Run ``command`` with the cores shared out among ``processes``; its output goes to ``log``.

    Raises:
        RuntimeError: it failed; with the end of the log.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with log.open("wb") as file:
        # a session of its own: signals to a launcher's pid would leave its ranks running
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
        try:
            code = process.wait()
        except BaseException:  # Ctrl-C: end the whole session before anything else happens
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(SHUTDOWN_S)
            raise
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL:])
        raise RuntimeError(f"{' '.join(command)} ended with {code}; the end of {log}:\n{tail}")
