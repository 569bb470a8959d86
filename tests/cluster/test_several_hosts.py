"""What is different for a guard when the job has other hosts, and how ranks of one host find each other under Slurm."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_mp.cluster.first_failure import claim, wait_until
from rlhf_mp.cluster.guard import job_id
from rlhf_mp.cluster.ranks import Ranks, check_shared
from rlhf_mp.errors import ConfigError

ROOT = Path(__file__).parents[2]
RANK = """
import sys, time
from pathlib import Path
from rlhf_mp.cluster.guard import start_guard

guard = start_guard(1, Path(sys.argv[1]), several_hosts=True)
Path(sys.argv[1], "tmp").write_text(str(guard.tmp))
time.sleep(100)
"""
SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "MASTER_PORT": "1234", "WORLD_SIZE": "4"}


@pytest.fixture
def rank(tmp_path):
    """On one of several hosts; the failure of an earlier run is still written down."""
    claim(tmp_path, "an earlier rank", 1, "died")
    environ = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path)], env=environ, stdout=subprocess.PIPE)
    assert wait_until(lambda: (tmp_path / "tmp").exists() and (tmp_path / "tmp").read_text() != "", 20)
    yield process
    process.kill()
    process.wait()
    assert wait_until(lambda: not Path((tmp_path / "tmp").read_text()).exists(), 20)


def test_a_failure_on_another_host_ends_this_one_silently_and_an_old_one_does_not(rank, tmp_path):
    time.sleep(1.5)
    assert rank.poll() is None
    (tmp_path / "first_failure.json").unlink()  # rank 0 does that when it starts
    claim(tmp_path, "rank 0 on another host", 1, "died")
    assert rank.wait(20) == -signal.SIGTERM
    assert rank.stdout.read() == b""  # whoever saw it has told the user
    assert "most recent call first" in (tmp_path / "logs/rank_1.log").read_text()  # it may be what hung


def test_ranks_of_a_slurm_step_agree_whatever_their_parents_and_steps_differ(monkeypatch):
    for name in ("LOCAL_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    ask = [sys.executable, "-c", "from rlhf_mp.cluster.guard import job_id; print(job_id())"]
    elsewhere = subprocess.run(["bash", "-c", '"$@"; true', "bash", *ask], cwd=ROOT, capture_output=True, text=True)
    assert elsewhere.stdout.strip() == job_id()
    found = {job_id()}
    for name, value in (("SLURM_STEP_ID", "2"), ("SLURM_RESTART_COUNT", "1"), ("SLURM_JOB_ID", "8")):
        monkeypatch.setenv(name, value)
        found.add(job_id())
    assert len(found) == 4
    monkeypatch.setenv("LOCAL_SIZE", "4")  # deepspeed inside a step: its process is the ranks' parent
    found.add(job_id())
    monkeypatch.setenv("SLURM_STEP_ID", "3")
    assert job_id() in found and len(found) == 5


class TwoHosts(Ranks):
    """Rank 0's side; the other host answers what it is told to."""

    def __init__(self, answer: str | None):
        super().__init__(0, 2)
        self.answer = answer

    def barrier(self) -> None:
        pass

    def broadcast(self, value):
        return value

    def gather(self, value):
        return [value, self.answer]


def test_a_run_directory_that_another_host_does_not_see_is_refused(tmp_path):
    check_shared(tmp_path, TwoHosts(None))
    with pytest.raises(ConfigError, match="does not appear on n2"):
        check_shared(tmp_path, TwoHosts("n2"))
    assert list(tmp_path.iterdir()) == []
