"""The real job on two machines: DeepSpeed ranks, Ray and SGLang on both, weights and samples over the network."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_mp.observe.sinks import read_jsonl

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600), pytest.mark.usefixtures("nothing_left")]
ROOT = Path(__file__).parents[2]
START_S = 1500  # half a minute; a busy machine must not look like a hang


def steps(job) -> list[int]:
    file = job.run_dir / "metrics.jsonl"
    return [record["step"] for record in read_jsonl(file) if "time/step_s" in record] if file.exists() else []


def test_two_machines_train_stop_on_request_requeue_and_finish_where_they_were(sbatch, cluster):
    job = sbatch(
        "actor_rollout_ref.rollout.num_engines=2",
        "trainer.total_training_steps=4",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        environ={"RLHF_MP_SCRIPT": "launch/train.py", "NCCL_DEBUG": "WARN"},
    )
    job.wait_for(lambda: 1 in steps(job), START_S)
    for node in ("n1", "n2"):
        running = cluster.run("ps", "axo", "args=", on=node)
        assert len(re.findall("sglang.launch_server", running)) == 1, node
        assert "ray::EngineHost" in running
        engine = cluster.run("pgrep", "-o", "-f", "sglang.launch_server", on=node).strip()
        assert "NCCL_DEBUG=WARN" in cluster.run("cat", f"/proc/{engine}/environ", on=node).split("\0")
    assert "ray::SchedulerActor" not in running  # that is with rank 0
    job.signal("USR1")
    ended = job.wait(START_S)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), job.everything_said()
    assert steps(job) == [1, 2, 3, 4]
    first = job.output("n1", restart=0)
    stopped = int(re.search(r"stopped on request after step (\d+)", first)[1])
    assert f"at step {stopped}" in job.output("n1", restart=1)
    assert (job.run_dir / "summary.json").exists()
    records = [record for record in read_jsonl(job.run_dir / "metrics.jsonl") if "time/step_s" in record]
    assert all(record["sync/changed_tensors_fraction"] > 0 for record in records)
    assert all(record["rollout/staleness_mean"] == 0 for record in records)


def test_engines_on_a_machine_of_their_own(sbatch, cluster):
    job = sbatch(
        "actor_rollout_ref.rollout.nnodes=1",
        "trainer.total_training_steps=3",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        config="configs/quickstart_async.yaml",
        environ={"RLHF_MP_SCRIPT": "launch/train.py"},
    )
    job.wait_for(lambda: 1 in steps(job), START_S)
    with_engines = [
        node for node in ("n1", "n2") if "sglang.launch_server" in cluster.run("ps", "axo", "args=", on=node)
    ]
    assert with_engines == ["n2"]
    ended = job.wait(START_S)
    assert ended["JobState"] == "COMPLETED", job.everything_said()
    assert steps(job) == [1, 2, 3]
    records = [record for record in read_jsonl(job.run_dir / "metrics.jsonl") if "time/step_s" in record]
    assert all(record["sync/changed_tensors_fraction"] > 0 for record in records)
    assert "n2 has joined with its engines" in (job.run_dir / "logs" / "rank_1.log").read_text()


def test_the_end_of_the_keeper_of_such_a_machine_ends_the_job(sbatch, cluster):
    job = sbatch(
        "actor_rollout_ref.rollout.nnodes=1",
        "trainer.total_training_steps=100",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        config="configs/quickstart_async.yaml",
        environ={"RLHF_MP_SCRIPT": "launch/train.py"},
    )
    joined = job.run_dir / "logs" / "rank_1.log"
    job.wait_for(lambda: joined.exists() and "has joined" in joined.read_text(), START_S)
    keeper = cluster.run("pgrep", "-o", "-f", "python -u launch/train.py", on="n2").strip()
    cluster.run("kill", "-9", keeper, on="n2")
    ended = job.wait(START_S)
    assert ended["JobState"] == "FAILED", job.everything_said()
    assert "rank 1 (pid" in (job.run_dir / "first_failure.json").read_text()


ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
PIPELINE = {f"{ACTOR}.megatron.tensor_model_parallel_size": 1, f"{ACTOR}.megatron.pipeline_model_parallel_size": 2}
TENSOR_INSIDE = PIPELINE | {f"{ACTOR}.megatron.tensor_model_parallel_size": 2, "trainer.n_gpus_per_node": 2}
LAYOUTS = {
    "megatron, a stage on each": ("configs/quickstart_megatron.yaml", PIPELINE),
    "megatron, a stage on each, its matrices on two ranks": ("configs/quickstart_megatron.yaml", TENSOR_INSIDE),
    "disjoint": ("configs/quickstart_async.yaml", {}),
}


@pytest.mark.long
@pytest.mark.parametrize(("config", "words"), LAYOUTS.values(), ids=LAYOUTS)
def test_two_machines_train_in_other_layouts(sbatch, config, words):
    job = sbatch(
        *(f"{key}={value}" for key, value in words.items()),
        f"{ROLLOUT}.num_engines=2",
        "trainer.total_training_steps=3",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        options=(f"--ntasks-per-node={words.get('trainer.n_gpus_per_node', 1)}",),
        config=config,
        environ={"RLHF_MP_SCRIPT": "launch/train.py"},
    )
    ended = job.wait(2 * START_S)
    assert ended["JobState"] == "COMPLETED", job.everything_said()
    assert steps(job) == [1, 2, 3]
    records = [record for record in read_jsonl(job.run_dir / "metrics.jsonl") if "time/step_s" in record]
    assert all(record["sync/changed_tensors_fraction"] > 0 for record in records)


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> list[str]:
    """What `make demo` starts from, in place of the suite's own small inputs."""
    folder = tmp_path_factory.mktemp("quickstart")
    subprocess.run([sys.executable, "-m", "rlhf_mp.quickstart", "--out", folder], check=True, cwd=ROOT)
    return [
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"data.train_files={folder / 'train.jsonl'}",
        f"data.val_files={folder / 'val.jsonl'}",
        "data.train_batch_size=64",
        f"{ACTOR}.ppo_mini_batch_size=16",
        f"{ROLLOUT}.n=8",
        f"{ROLLOUT}.max_num_seqs=256",
    ]


QUICKSTARTS = {
    "deepspeed": ("configs/quickstart.yaml", {}),
    "megatron, a stage on each": ("configs/quickstart_megatron.yaml", PIPELINE),
    "disjoint": ("configs/quickstart_async.yaml", {}),
    "engines on a machine of their own": ("configs/quickstart_async.yaml", {f"{ROLLOUT}.nnodes": 1}),
}


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("config", "words"), QUICKSTARTS.values(), ids=QUICKSTARTS)
def test_the_quickstart_learns_on_two_machines(sbatch, material, config, words):
    engines = [] if f"{ROLLOUT}.nnodes" in words else [f"{ROLLOUT}.num_engines=2"]
    changed = (f"{key}={value}" for key, value in words.items())
    job = sbatch(*material, *engines, *changed, config=config, environ={"RLHF_MP_SCRIPT": "launch/train.py"})
    ended = job.wait(7000)
    assert ended["JobState"] == "COMPLETED", job.everything_said()
    accuracy = [r["eval/accuracy"] for r in read_jsonl(job.run_dir / "metrics.jsonl") if "eval/accuracy" in r]
    print(accuracy)
    assert accuracy[0] <= 0.5 and accuracy[-1] >= 0.85
