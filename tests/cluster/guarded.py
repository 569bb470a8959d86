"""A job of ranks under guards, as a launcher would start it: real processes that tests let die."""

import os
import subprocess
import sys
from pathlib import Path

from rlhf_mp.cluster.first_failure import wait_until
from rlhf_mp.cluster.processes import belonging_to

REPOSITORY = Path(__file__).parents[2]
SHM = Path("/dev/shm")

RANK = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
from rlhf_mp.cluster.guard import start_guard

rank, run_dir = int(sys.argv[1]), Path(sys.argv[2])
guard = start_guard(rank, run_dir, alert=os.environ.get("ALERT"))
silent = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
daemon = subprocess.Popen(["sleep", "300"], start_new_session=True, **silent)
Path(f"/dev/shm/torch_{os.getpid()}_4711_0").touch()
Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{os.environ['MASTER_PORT']}_{rank}").touch()

def announce():
    (run_dir / f"ready.{rank}.tmp").write_text(f"{guard.tmp} {daemon.pid}")
    (run_dir / f"ready.{rank}.tmp").rename(run_dir / f"ready.{rank}")

"""


class Job:
    """Ranks started as a launcher would: children of this process, which doesn't collect them until asked to."""

    def __init__(self, run_dir: Path, port: int, num_ranks: int):
        self.run_dir, self.port, self.num_ranks = run_dir, port, num_ranks
        self.run_dir.mkdir()
        self.output = run_dir / "terminal"
        self.ranks: list[subprocess.Popen] = []

    def start(self, body: str, *arguments: str, command: tuple = (sys.executable, "-c")) -> subprocess.Popen:
        """Start the next rank; returns once it has called ``announce()``."""
        rank = len(self.ranks)
        environ = os.environ | {
            "WORLD_SIZE": str(self.num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port),
            "PYTHONPATH": str(REPOSITORY),
        }  # fmt: skip
        group = self.ranks[0].pid if self.ranks else 0
        with open(self.output, "a") as output:
            process = subprocess.Popen(
                [*command, RANK + body, str(rank), str(self.run_dir), *arguments],
                env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=group,
            )  # fmt: skip
        self.ranks.append(process)
        ready = self.run_dir / f"ready.{rank}"
        assert wait_until(ready.exists, 20), self.terminal()
        tmp, daemon = ready.read_text().split()
        self.tmp, self.daemon = Path(tmp), int(daemon)
        return process

    def terminal(self) -> str:
        return self.output.read_text()

    def log(self, rank: int) -> str:
        return (self.run_dir / "logs" / f"rank_{rank}.log").read_text()

    def processes(self) -> set[int]:
        """Ranks and guards have the run directory among their arguments, everything else has the mark."""
        marked = belonging_to(f"RLHF_MP_JOB={self.tmp.name.removeprefix('rlhf_mp_')}", set())
        return marked | with_argument(str(self.run_dir))

    def shared_memory(self) -> list[Path]:
        pids = [rank.pid for rank in self.ranks]
        return [p for pid in pids for p in SHM.glob(f"torch_{pid}_*")] + list(SHM.glob(f"*_127.0.0.1_{self.port}_*"))

    def ends_within(self, seconds: float) -> bool:
        return wait_until(lambda: not self.processes(), seconds)

    def left(self) -> list:
        """What outlives the job, of any kind."""
        return [*self.processes(), *self.shared_memory(), *([self.tmp] if self.tmp.exists() else [])]

    def stop(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()
        assert self.ends_within(20)
        assert self.left() == []


def with_argument(text: str) -> set[int]:
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if text in Path(f"/proc/{pid}/cmdline").read_text(errors="replace"):
                found.add(int(pid))
        except (FileNotFoundError, ProcessLookupError):
            pass
    return found - {os.getpid()}
