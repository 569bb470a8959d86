"""One Slurm of three machines for the whole session, and the project's own batch script on it."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import apt_packages
import pytest
from additions import make_inputs
from cluster import ENDED, NAMESPACES, Cluster

from rlhf_mp.cluster.first_failure import tail, wait_until

ROOT = Path(__file__).parents[2]
LOOK_EVERY_S = 1.0
PATIENCE_S = 180  # most takes seconds; a busy machine must not look like a hang
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "iproute2")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter")
# What a container often may not do, root or not.
TRIAL = "ip link add eth0 type bridge && ip link add veth0 type veth peer name veth1 && mount -t tmpfs tmp /mnt"
ENV = """
export PATH={bin}:$PATH PYTHONPATH={root} DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 TORCH_EXTENSIONS_DIR={extensions}
SRUN_OPTIONS=() NODE_PREFIX=() MAX_RESTARTS=2
"""


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]


def install() -> str:
    """Why Slurm can't be had here; empty once it is installed."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a Slurm of several machines on one takes Linux and root"
    if missing_programs() and (why := apt_packages.install(*PACKAGES)):
        return f"Slurm is not installed: {why}"
    if missing := missing_programs():
        return f"not installed: {', '.join(missing)}"
    tried = subprocess.run(["unshare", *NAMESPACES, "--fork", "sh", "-c", TRIAL], capture_output=True, text=True)
    return f"machines can't be made here: {tried.stderr.strip()[-300:]}" if tried.returncode else ""


class Job:
    """A batch job of the project's script, its run directory, and what it has said."""

    def __init__(self, cluster: Cluster, number: str, run_dir: Path):
        self.cluster, self.number, self.run_dir = cluster, number, run_dir

    def log(self) -> str:
        file = self.run_dir.with_name(f"{self.run_dir.name}.{self.number}.log")
        return file.read_text(errors="replace") if file.exists() else ""

    def everything_said(self) -> str:
        """By the batch script, and the end of what each rank, engine and node has written."""
        files = sorted((self.run_dir / "logs").rglob("*.log"))
        return "\n".join([self.log(), *(f"--- {file.name}\n{tail(file, 60)}" for file in files if file.exists())])

    def output(self, node: str, restart: int = 0) -> str:
        return (self.run_dir / f"logs/slurm-{self.number}/node-{node}.{restart}.log").read_text(errors="replace")

    def wait_for(self, condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
        """Until it holds; a job that has ended before fails at once."""
        deadline = time.monotonic() + timeout_s
        while not wait_until(condition, LOOK_EVERY_S):
            job = self.cluster.job(self.number)
            over = job["JobState"] in ENDED or time.monotonic() > deadline
            assert not over or condition(), f"{job}\n{self.everything_said()}"

    def wait_ready(self, restart: int = 0, num_ranks: int = 2) -> list[str]:
        """What each rank of endless.py said of itself, once all run."""
        files = [self.run_dir / f"ready.{rank}.{restart}" for rank in range(num_ranks)]
        self.wait_for(lambda: all(file.exists() and file.read_text() for file in files))
        return [file.read_text() for file in files]

    def end(self, rank: int, exit_code: int, restart: int = 0) -> None:
        (self.run_dir / f"exit.{rank}.{restart}").write_text(str(exit_code))

    def signal(self, name: str) -> None:
        """To the batch script alone, as Slurm does before a time limit or a pre-emption."""
        self.cluster.run("scancel", "--batch", f"--signal={name}", self.number)

    def wait(self, timeout_s: float = PATIENCE_S) -> dict[str, str]:
        try:
            return self.cluster.wait_job(self.number, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.everything_said()}") from None


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := install():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    made = Cluster(
        folder / "cluster", 3, cpus=4, memory_mb=16_000, shared=[ROOT, tmp_path_factory.getbasetemp(), folder]
    )
    yield made
    made.stop()


@pytest.fixture
def nothing_left(cluster: Cluster) -> Iterator[None]:
    """Checked after a test: no process, no file in /tmp or /dev/shm on any node."""
    yield
    assert cluster.left() == []


@pytest.fixture(scope="session")
def inputs(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return make_inputs(tiny_checkpoint, tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="session")
def env_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user writes instead of launch/slurm/env.sh."""
    file = tmp_path_factory.mktemp("env") / "env.sh"
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR", "")
    file.write_text(ENV.format(bin=Path(sys.executable).parent, root=ROOT, extensions=extensions))
    return file


@pytest.fixture
def sbatch(cluster: Cluster, inputs: list[str], env_file: Path, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """``sbatch(*overrides, nodes=2, ...)`` submits train.sbatch; jobs that still run after a test are cancelled."""
    jobs: list[Job] = []

    def submit(
        *overrides: str,
        nodes: int = 2,
        options: tuple = (),
        environ: dict | None = None,
        config: str = "",
        **extra: str,
    ) -> Job:
        run_dir = tmp_path / f"run{len(jobs)}"
        own = {"RLHF_MP_ENV": str(env_file), "RLHF_MP_SCRIPT": "tests/slurm/endless.py"} | (environ or {})
        words = [
            *(f"{name}={value}" for name, value in own.items()), "sbatch", "--parsable",
            f"--output={run_dir}.%j.log", f"--nodes={nodes}", "--ntasks-per-node=1", "--mem=4G", "--time=60", *options,
            "launch/slurm/train.sbatch", "--config", config or "configs/quickstart.yaml", *inputs,
            "trainer.n_gpus_per_node=1", f"trainer.default_local_dir={run_dir}", *overrides,
        ]  # fmt: skip
        number = cluster.run("env", *words, cwd=ROOT).strip()
        jobs.append(Job(cluster, number, run_dir))
        return jobs[-1]

    yield submit
    for job in jobs:
        cluster.run("scancel", "--quiet", job.number, check=False)
    wait_until(lambda: not cluster.run("squeue", "-h"), PATIENCE_S)
    cluster.wait_idle()  # a node that was lost comes back after a while, and the next test names nodes
