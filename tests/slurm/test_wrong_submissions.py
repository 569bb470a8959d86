"""A job that can't start says why in its own log, soon, and starts nothing."""

import json
import shutil
import time

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("nothing_left")]
LIMIT_S = 30


def refused(job, exit_code: int = 2, limit_s: float = LIMIT_S) -> str:
    """The log of a job that ended soon."""
    began = time.monotonic()
    ended = job.wait(2 * limit_s)
    assert time.monotonic() - began < limit_s
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", f"{exit_code}:0"), job.log()
    assert not (job.run_dir / "ready.0.0").exists()
    return job.log()


def test_every_problem_of_the_config_and_of_the_allocation_at_once(sbatch):
    log = refused(sbatch("actor_rollout_ref.actor.ppo_mini_batch_size=3", "trainer.save_freq=0"))
    assert "n1: 2 problem(s)" in log
    log = refused(sbatch("trainer.n_gpus_per_node=2", "data.train_files=nowhere.jsonl"))
    assert "n1: 2 problem(s)" in log
    assert "the allocation has 1,1 task(s) on its nodes" in log
    assert "sbatch --ntasks-per-node=2" in log
    assert "nothing was started" in log


def test_too_few_nodes_for_the_plan(sbatch, inputs, tmp_path):
    model = shutil.copytree(inputs[0].partition("=")[2], tmp_path / "model")
    shape = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 10**6}
    (model / "config.json").write_text(json.dumps(shape))
    long = ["data.max_response_length=400000", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=500000"]
    log = refused(sbatch(f"actor_rollout_ref.model.path={model}", *long))
    assert "actor_rollout_ref.model.path = 'model': " in log
    assert "trainer.skip_plan=true" in log


def test_a_config_that_only_the_submitting_machine_has(sbatch, cluster):
    cluster.run("cp", "configs/quickstart.yaml", "/tmp/only_here.yaml", cwd=cluster.shared[1])
    try:
        log = refused(sbatch(config="/tmp/only_here.yaml"))
    finally:
        cluster.run("rm", "/tmp/only_here.yaml")
    for node in ("n1", "n2"):
        assert f"{node}: 1 problem(s)\n- /tmp/only_here.yaml = 'unreadable': there is no such file" in log


def test_a_missing_environment(sbatch, tmp_path):
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/no/such/python\n")
    interpreter.chmod(0o755)
    (tmp_path / "env.sh").write_text(f"export PATH={tmp_path}:$PATH; SRUN_OPTIONS=() NODE_PREFIX=() MAX_RESTARTS=0\n")
    log = refused(sbatch(environ={"RLHF_MP_ENV": str(tmp_path / "env.sh")}))
    assert "n2: python does not start; activate an environment in" in log
    log = refused(sbatch(environ={"RLHF_MP_ENV": str(tmp_path / "nowhere.sh")}))
    assert "nowhere.sh could not be read" in log


def test_a_busy_port(sbatch, cluster, env_file, tmp_path):
    own = tmp_path / "env.sh"
    own.write_text(f"{env_file.read_text()}export MASTER_PORT=23456\n")
    listen = "import socket, time; s = socket.socket(); s.bind(('', 23456)); s.listen(); time.sleep(60)"
    cluster.run("sh", "-c", f'python3 -c "{listen}" >/dev/null 2>&1 & echo $! > /tmp/listener', on="n1")
    try:
        log = refused(sbatch(environ={"RLHF_MP_ENV": str(own)}))
    finally:
        cluster.run("sh", "-c", "kill $(cat /tmp/listener); rm /tmp/listener", on="n1")
    assert "MASTER_PORT = 23456: another process listens there" in log


def test_a_folder_without_the_project(cluster, sbatch, tmp_path):
    log = tmp_path / "elsewhere.log"
    script = cluster.shared[1] / "launch/slurm/train.sbatch"
    number = cluster.run("sbatch", "--parsable", f"--output={log}", str(script), cwd=tmp_path).strip()
    assert cluster.wait_job(number)["ExitCode"] == "2:0"
    assert "submit from the project's folder" in log.read_text()


def test_a_node_that_is_dead_at_the_start(sbatch, cluster):
    cluster.power_off("n3")
    try:
        job = sbatch(nodes=3, environ={"SLURM_RESTART_COUNT": "9"})  # it would requeue itself otherwise
        log = refused(job, exit_code=75, limit_s=60)  # 13 s; Slurm's own time-outs grow on a busy machine
    finally:
        cluster.power_on("n3")
        cluster.wait_idle()
    assert "failed on node n3" in log
    assert "a node of n1 n2 n3 does not answer" in log
