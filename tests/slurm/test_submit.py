"""submit.py from the login machine: what it derives is what Slurm takes, and it returns the job's own exit code."""

import subprocess
import sys

import pytest

from rlhf_mp.cluster.first_failure import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("nothing_left")]


def test_submitting_following_and_the_jobs_exit_code(cluster, inputs, env_file, tmp_path):
    run_dir, root = tmp_path / "run", cluster.shared[1]
    words = [
        "env", f"RLHF_MP_ENV={env_file}", "RLHF_MP_SCRIPT=tests/slurm/endless.py", f"PYTHONPATH={root}", sys.executable,
        "launch/slurm/submit.py", "--config", "configs/quickstart.yaml", "--nodes", "2", "--follow", "--time", "30",
        *inputs, "trainer.device=cpu", "trainer.n_gpus_per_node=1", f"trainer.default_local_dir={run_dir}",
    ]  # fmt: skip
    submitted = subprocess.Popen(cluster.inside("ctl", *words, cwd=root), stdout=subprocess.PIPE, text=True)
    ready = [run_dir / f"ready.{rank}.0" for rank in (0, 1)]
    assert wait_until(lambda: all(file.exists() and file.read_text() for file in ready), 180)
    (run_dir / "exit.1.0").write_text("9")
    shown, _ = submitted.communicate(timeout=180)
    assert submitted.returncode == 9
    assert "sbatch --parsable --job-name=grpo" in shown and "--nodes=2 --ntasks-per-node=1 --cpus-per-task=1" in shown
    assert "the first to end was task 1 on n2" in shown
    assert "FAILED, exit code 9" in shown
