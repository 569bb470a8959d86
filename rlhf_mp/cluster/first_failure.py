"""The one thing a user reads about when a job fails: what went wrong first. Whoever claims the file tells the user."""

import json
import time
from collections.abc import Callable
from pathlib import Path

FIRST_FAILURE = "first_failure.json"
NUM_TAIL_LINES = 30
GRACE_S = 1.5


def claim(run_dir: Path, what: str, pid: int, message: str) -> bool:
    """Write down the job's first failure; False where one is written already."""
    try:
        with open(run_dir / FIRST_FAILURE, "x") as file:
            json.dump({"what": what, "pid": pid, "when": time.strftime("%FT%T%z"), "message": message}, file)
    except FileExistsError:
        return False
    except OSError:  # a full disk: the user must read about it all the same
        pass
    return True


def claimed_meanwhile(run_dir: Path, grace_s: float = GRACE_S) -> bool:
    """Give way to an earlier failure: a broken connection or an exit code often follows from a death elsewhere."""
    return wait_until((run_dir / FIRST_FAILURE).exists, grace_s)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return met


def failure_text(what: str, message: str, log: Path | None) -> str:
    text = f"\n{what}: {message}\n"
    if log is None:
        return text
    if not log.exists():
        return f"{text}It ended before it began its log {log}.\n"
    lines = tail(log, NUM_TAIL_LINES)
    return f"{text}Last lines of {log}:\n{lines}\n" if lines else f"{text}Its log {log} is empty.\n"


def tail(path: Path, num_lines: int) -> str:
    """The last lines of a file that may be large and still being written."""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 1000 * num_lines))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-num_lines:])
