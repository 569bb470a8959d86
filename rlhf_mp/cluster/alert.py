"""A command of the user's, run once when a job fails: a mail, a message, a page."""

import os
import subprocess
from pathlib import Path

TIMEOUT_S = 60
MAX_REASON = 4000  # characters; the rest is in first_failure.json


def send_alert(command: str | None, what: str, message: str, run_dir: Path) -> None:
    """Start it and don't wait: a mail server that is down must not hold up the end. What it says is in logs/alert.log.

    It is no part of the job, which would end it, and has TIMEOUT_S of its own.
    """
    if command is None:
        return
    environment = {name: value for name, value in os.environ.items() if name != "RLHF_MP_JOB"}
    told = {"RLHF_MP_WHAT": what, "RLHF_MP_REASON": message[:MAX_REASON], "RLHF_MP_RUN_DIR": str(run_dir)}
    try:
        with open(run_dir / "logs" / "alert.log", "ab") as log:
            subprocess.Popen(
                ["timeout", str(TIMEOUT_S), "sh", "-c", command],
                env=environment | told, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
    except OSError:  # a full disk, or no more processes: the user must read about the failure all the same
        pass
