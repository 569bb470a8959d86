"""A real job: started as a user would, watched through /proc, and checked to leave nothing behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rlhf_mp.checkpoint import newest_first
from rlhf_mp.cluster.first_failure import wait_until
from rlhf_mp.cluster.guard import BOOT
from rlhf_mp.cluster.processes import belonging_to, is_alive, start_time
from rlhf_mp.config.load import load_config
from rlhf_mp.observe.sinks import read_jsonl
from rlhf_mp.planner.disk import disk_plan
from rlhf_mp.planner.preflight import Machine, job_of

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
SHM = Path("/dev/shm")
LISTENING = "0A"
PATIENCE_S = 900  # a job takes half a minute; a busy machine must not look like a hang
LOOK_EVERY_S = 1.0  # reading all of /proc takes a while
LAUNCHER_VARIABLES = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}
LAUNCH = ROOT / "launch" / "train.py"
ENGINE_ROUNDING = "actor/rollout_"
"""Metrics of how far engine and trainer are apart. An engine's last bits depend on what it decodes together, and
nothing else is computed from them."""


def launcher(num_ranks: int) -> list[str]:
    """What a user types before the script: plain python for one rank, deepspeed for several."""
    if num_ranks == 1:
        return [sys.executable]
    port = 20_000 + os.getpid() % 10_000  # jobs of one test run follow each other; below those that systems hand out
    return [str(BIN / "deepspeed"), "--num_gpus", str(num_ranks), "--master_port", str(port)]


def command(config: Path, *overrides: str, num_ranks: int = 1, script: Path = LAUNCH) -> list[str]:
    """What a user types."""
    return [*launcher(num_ranks), str(script), "--config", str(config), *overrides]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    return kept | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


class Job:
    """Started on construction, in a session of its own. Whatever is seen of it is remembered until ``left``."""

    def __init__(
        self, run_dir: Path, *overrides: str, num_ranks: int = 1, config: Path = QUICKSTART, script: Path = LAUNCH
    ):
        self.run_dir, self.output_file = run_dir, run_dir.with_name(f"{run_dir.name}.output")
        self.guards: dict[int, dict] = {}  # what the guard of each rank was told
        self._processes: dict[int, str] = {}  # pid: start time
        self._sockets: set[str] = set()
        self._mapped: set[str] = set()  # names in /dev/shm
        self._shared_memory = set(os.listdir(SHM))  # there before
        self._next_look = 0.0
        words = [*overrides, f"trainer.default_local_dir={run_dir}", f"trainer.n_gpus_per_node={num_ranks}"]
        with open(self.output_file, "a") as output:
            self.launcher = subprocess.Popen(
                command(config, *words, num_ranks=num_ranks, script=script), env=environment(), cwd=ROOT,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    # --- what it says

    def output(self) -> str:
        return self.output_file.read_text(errors="replace")

    def metrics(self) -> list[dict]:
        file = self.run_dir / "metrics.jsonl"
        return read_jsonl(file) if file.exists() else []

    def steps(self) -> dict[int, dict]:
        """Metrics of training steps, by step."""
        return {record["step"]: record for record in self.metrics() if "time/step_s" in record}

    def summary(self) -> dict:
        return json.loads((self.run_dir / "summary.json").read_text())

    def first_failure(self) -> dict:
        return json.loads((self.run_dir / "first_failure.json").read_text())

    # --- how far it is

    def wait_for_step(self, step: int) -> None:
        self._wait_until(lambda: step in self.steps() or self._has_ended())
        assert not self._has_ended(), f"ended before step {step}:\n{self.output()}"

    def wait(self) -> int:
        """The exit code that a shell would show."""
        self._wait_until(self._has_ended)
        return self.launcher.returncode

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        def met() -> bool:
            self._look()
            return condition()

        if not wait_until(met, PATIENCE_S):
            self.stop()
            raise AssertionError(f"nothing happened for {PATIENCE_S} s:\n{self.output()}")

    def _has_ended(self) -> bool:
        return self.launcher.poll() is not None

    def stop(self) -> None:
        """For a test that failed half-way."""
        if not self._has_ended():
            os.killpg(self.launcher.pid, signal.SIGTERM)
            self.launcher.wait(30)

    # --- its processes

    def rank(self, number: int) -> int:
        return self.guards[number]["pid"]

    def titled(self, title: str) -> int:
        """The one process of the job whose command line matches."""
        found = [pid for pid in self._marked() if re.search(title, command_line(pid))]
        assert len(found) == 1, f"{title}: {found}"
        return found[0]

    def _marked(self) -> set[int]:
        marks = {f"RLHF_MP_JOB={guard['job']}" for guard in self.guards.values()}
        return {pid for mark in marks for pid in belonging_to(mark, set())}

    def _look(self) -> None:
        """Note guards, processes, sockets and shared memory, now and then."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_EVERY_S
        pids = set()
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            words = command_line(pid).rstrip("\0").split("\0")
            if BOOT in words and (guard := json.loads(words[-1]))["run_dir"] == str(self.run_dir.resolve()):
                self.guards[guard["number"]] = guard
                pids |= {pid, guard["pid"]}
        pids |= self._marked()
        if psutil.pid_exists(self.launcher.pid):
            pids |= {child.pid for child in psutil.Process(self.launcher.pid).children(recursive=True)}
        for pid in pids:
            try:
                self._processes[pid] = start_time(pid)
                self._sockets |= {os.readlink(entry) for entry in os.scandir(f"/proc/{pid}/fd")}
                self._mapped |= mapped_shared_memory(pid)
            except (OSError, IndexError):  # gone meanwhile
                pass

    # --- what is left of it

    def left(self) -> list[str]:
        """Whatever of the job outlives it: processes, listening sockets, shared memory, its folder in /tmp."""
        alive = {pid for pid, started in self._processes.items() if is_alive(pid, started)} | self._marked()
        return [
            *(f"process {pid}: {command_line(pid)}" for pid in alive),
            *(f"listening {socket}" for socket in self._sockets & listening_sockets()),
            *(f"shared memory {name}" for name in self._shared_memory_left()),
            *{guard["tmp"] for guard in self.guards.values() if Path(guard["tmp"]).exists()},
        ]

    def _shared_memory_left(self) -> set[str]:
        """Files that processes of this job mapped; others of this machine may come and go meanwhile."""
        ours = {name for name in os.listdir(SHM) if name in self._mapped or name.startswith(self._own_prefixes())}
        return ours - self._shared_memory

    def _own_prefixes(self) -> tuple[str, ...]:
        return (*(f"torch_{pid}_" for pid in self._processes), *(guard["buffers"] for guard in self.guards.values()))

    def assert_disk_as_planned(self) -> None:
        """Its newest checkpoint and its export, without the small files: scripts, manifests, random states."""

        def weight(folder: Path) -> int:
            return sum(file.stat().st_size for file in folder.rglob("*") if file.stat().st_size > 50_000)

        config = load_config(self.run_dir / "config.yaml")
        planned = disk_plan(config, job_of(config, Machine(None, None)))
        assert weight(newest_first(self.run_dir)[0]) == pytest.approx(planned.checkpoint, rel=0.05)
        assert weight(self.run_dir / "huggingface") == pytest.approx(planned.export, rel=0.05)

    def assert_nothing_left(self, seconds: float = 30) -> None:
        assert self.guards, "no guard was ever seen"
        assert wait_until(lambda: not self.left(), seconds), self.left()


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def listening_sockets() -> set[str]:
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {f"socket:[{fields[9]}]" for fields in lines if fields[3] == LISTENING}


def mapped_shared_memory(pid: int) -> set[str]:
    return set(re.findall(rf" {SHM}/(\S+)", Path(f"/proc/{pid}/maps").read_text(errors="replace")))
