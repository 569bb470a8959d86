"""The same ranks on several machines by torchrun, one command on each. Slurm takes no part."""

import subprocess

import pytest

from rlhf_mp.cluster.first_failure import wait_until

pytestmark = pytest.mark.usefixtures("nothing_left")
TORCHRUN = "torchrun --nnodes 2 --nproc-per-node 1 --node-rank {node} --master-addr n1 --master-port 29511"


@pytest.fixture
def launched(cluster, env_file, inputs, tmp_path):
    """(run directory, a launcher on n1, one on n2)."""
    overrides = [*inputs, f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.nnodes=2"]
    script = ["tests/slurm/endless.py", "--config", "configs/quickstart.yaml", "trainer.n_gpus_per_node=1", *overrides]
    started = []
    for node in (0, 1):
        command = TORCHRUN.format(node=node)
        words = ["bash", "-c", f'source {env_file} && exec {command} "$@"', "bash", *script]
        started.append(subprocess.Popen(cluster.inside(f"n{node + 1}", *words, cwd=cluster.shared[1])))
    yield tmp_path / "run", *started
    for process in started:
        process.terminate()
        process.wait(60)


def test_a_failure_on_one_machine_ends_the_other(launched):
    run_dir, first, second = launched
    ready = [run_dir / f"ready.{rank}.0" for rank in (0, 1)]
    assert wait_until(lambda: all(file.exists() and file.read_text() for file in ready), 60)
    assert [file.read_text().split()[0] for file in ready] == ["n1", "n2"]
    assert "rank=1, local_rank=0, world_size=2, local_world_size=1" in ready[1].read_text()
    (run_dir / "die.1").touch()
    assert second.wait(60) != 0
    assert first.wait(60) != 0
    assert "rank 1 (pid" in (run_dir / "first_failure.json").read_text()
