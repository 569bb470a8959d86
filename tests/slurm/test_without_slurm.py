"""The same ranks on several machines by torchrun or deepspeed, one command on each. Slurm takes no part."""

import subprocess
from pathlib import Path

import pytest

from rlhf_mp.cluster.first_failure import wait_until
from rlhf_mp.observe.sinks import read_jsonl

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("nothing_left")]
LAUNCHERS = {
    "torchrun": "torchrun --nnodes 2 --nproc-per-node 1 --node-rank {node} --master-addr n1 --master-port 29511",
    "deepspeed": "deepspeed --hostfile {hosts} --no_ssh --node_rank {node} --master_addr n1 --master_port 29512",
}
ROLLOUT = "actor_rollout_ref.rollout"
SHORT = (
    f"{ROLLOUT}.num_engines=2",
    "actor_rollout_ref.weight_sync.transport=distributed",
    "trainer.total_training_steps=2",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
)  # fmt: skip


@pytest.fixture
def launch(cluster, env_file, inputs, tmp_path):
    """``launch(launcher, script, *overrides)`` starts one on n1 and one on n2, which write into ``tmp_path/run``."""
    started: list[subprocess.Popen] = []
    (tmp_path / "hosts").write_text("n1 slots=1\nn2 slots=1\n")

    def start(launcher: str, script: str, *overrides: str) -> list[subprocess.Popen]:
        own = [f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.nnodes=2", "trainer.n_gpus_per_node=1"]
        words = [script, "--config", "configs/quickstart.yaml", *inputs, *own, *overrides]
        for node in (0, 1):
            command = LAUNCHERS[launcher].format(node=node, hosts=tmp_path / "hosts")
            shell = ["bash", "-c", f'source {env_file} && exec {command} "$@"', "bash", *words]
            with open(tmp_path / f"terminal.{node}", "w") as output:
                inside = cluster.inside(f"n{node + 1}", *shell, cwd=cluster.shared[1])
                started.append(subprocess.Popen(inside, stdout=output, stderr=output))
        return started

    yield start
    for process in started:
        process.terminate()
        process.wait(60)


def said(folder: Path) -> str:
    return "".join((folder / f"terminal.{node}").read_text(errors="replace")[-4000:] for node in (0, 1))


def test_a_failure_on_one_machine_ends_the_other(launch, tmp_path):
    first, second = launch("torchrun", "tests/slurm/endless.py")
    run_dir = tmp_path / "run"
    ready = [run_dir / f"ready.{rank}.0" for rank in (0, 1)]
    assert wait_until(lambda: all(file.exists() and file.read_text() for file in ready), 180), said(tmp_path)
    assert [file.read_text().split()[0] for file in ready] == ["n1", "n2"]
    assert "rank=1, local_rank=0, world_size=2, local_world_size=1" in ready[1].read_text()
    (run_dir / "die.1").touch()
    assert second.wait(180) != 0
    assert first.wait(180) != 0
    assert "rank 1 (pid" in (run_dir / "first_failure.json").read_text()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("deepspeed", marks=pytest.mark.long)])
def test_the_whole_trainer_runs_on_two_machines(launch, tmp_path, launcher):
    for process in launch(launcher, "launch/train.py", *SHORT):
        assert process.wait(1500) == 0, said(tmp_path)
    records = [record for record in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "time/step_s" in record]
    assert [record["step"] for record in records] == [1, 2]
    assert all(record["sync/changed_tensors_fraction"] > 0 for record in records)
    assert (tmp_path / "run" / "summary.json").exists()
