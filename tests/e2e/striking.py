"""A reward that is also the fault: it judges in the middle of a rollout, so it can strike exactly there.

``score`` is the exact reward. Before it judges its so-manieth group it does what ``script`` says of that number:

    [1, "SIGKILL", 0]     send a signal to engine 0 and its workers
    [1, "swap", 0]        the same with SIGKILL, once the next swap has begun to write weights (transport "disk")
    [8, "wait", "text"]   judge no further before the scheduler's log contains the text
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.faults import server

calls = 0


def score(responses, *, prompt, answer, source, script=(), run_dir=""):
    global calls
    calls += 1
    for number, act, subject in script:
        if number == calls:
            ACTS.get(act, send)(Path(run_dir), subject, act)
    return [float(response.strip() == answer) for response in responses]


def send(run_dir: Path, engine: int, name: str) -> None:
    os.killpg(server(run_dir, engine), getattr(signal, name))
    with open(run_dir / "struck", "a") as log:
        log.write(f"{time.time()} {name} {engine}\n")


def at_the_next_swap(run_dir: Path, engine: int, _) -> None:
    subprocess.Popen([sys.executable, __file__, str(run_dir), str(server(run_dir, engine))], start_new_session=True)


def wait(run_dir: Path, text: str, _) -> None:
    log = run_dir / "logs" / "scheduler.log"
    while text not in log.read_text(errors="replace"):
        time.sleep(0.1)


ACTS = {"swap": at_the_next_swap, "wait": wait}

if __name__ == "__main__":
    folder, pid = Path(sys.argv[1]) / "weights", int(sys.argv[2])
    limit = time.monotonic() + 60
    while not folder.exists() and time.monotonic() < limit:
        time.sleep(0.0005)
    os.killpg(pid, signal.SIGKILL)
