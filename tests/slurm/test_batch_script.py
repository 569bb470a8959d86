"""The life of a batch job on a real Slurm: the project's script unchanged, ranks that only wait."""

import re
import time

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("nothing_left")]
# In the shell that submits: inherited, a rank would take itself for another and wait for ever.
OF_ANOTHER_RUN = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "LOCAL_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
}  # fmt: skip


@pytest.mark.parametrize(("nodes", "tasks"), [(1, 1), (2, 2), (3, 1)])
def test_one_task_a_rank_on_as_many_nodes_as_allocated(sbatch, nodes, tasks):
    size = nodes * tasks
    per_node = {"options": (f"--ntasks-per-node={tasks}",), "environ": OF_ANOTHER_RUN}
    job = sbatch(f"trainer.n_gpus_per_node={tasks}", nodes=nodes, **per_node)
    for rank, said in enumerate(job.wait_ready(num_ranks=size)):
        node, local = divmod(rank, tasks)
        expected = f"n{node + 1} RankInfo(rank={rank}, local_rank={local}, world_size={size}, local_world_size={tasks},"
        assert said.startswith(expected)
        job.end(rank, 0)
    assert job.wait()["JobState"] == "COMPLETED"
    logs = job.run_dir / "logs" / f"slurm-{job.number}"
    found = {file.name for file in logs.iterdir()}
    assert found == {"batch.log", *(f"node-n{i + 1}.0.log" for i in range(nodes))}
    assert "ended with exit code 0" in (logs / "batch.log").read_text()


def test_a_ranks_exit_code_is_the_jobs_and_ends_the_others(sbatch):
    job = sbatch()
    job.wait_ready()
    job.end(1, 7)
    ended = job.wait()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "7:0", "0")
    assert "the first to end was task 1 on n2" in job.log()


def test_a_killed_rank_is_named_with_its_node(sbatch, cluster):
    job = sbatch()
    pid = job.wait_ready()[1].split()[-1]
    cluster.run("kill", "-9", pid, on="n2")
    assert job.wait()["JobState"] == "FAILED"
    assert re.search(rf"first failure: .*rank 1 \(pid {pid} on n2\).*died without a word", job.log())


def test_before_the_time_limit_the_job_stops_by_itself_requeues_and_resumes(sbatch):
    job = sbatch(options=("--time=1", "--signal=B:USR1@20"))
    job.wait_ready()
    job.wait_ready(restart=1)
    assert "stopped after a checkpoint; requeued" in job.log()
    for rank in (0, 1):
        job.end(rank, 0, restart=1)
    ended = job.wait()
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1")


def test_a_wish_to_stop_that_comes_before_the_ranks_is_kept(sbatch, env_file, tmp_path):
    own = tmp_path / "env.sh"
    at_once = '[ "${SLURM_STEP_ID:-}" ] || [ "${SLURM_RESTART_COUNT:-0}" != 0 ] || kill -USR1 $$'
    own.write_text(f"{env_file.read_text()}{at_once}\n")
    job = sbatch(environ={"RLHF_MP_ENV": str(own)})
    job.wait_ready(restart=1)
    assert "stopped after a checkpoint; requeued" in job.log()


def test_a_preempted_job_makes_way_and_comes_back(sbatch, cluster):
    job = sbatch(options=("--exclusive",))
    job.wait_ready()
    urgent = cluster.run(
        "sbatch", "--parsable", "-p", "high", "-N3", "--exclusive", "-o", "/dev/null", "--wrap", "true"
    ).strip()
    assert cluster.wait_job(urgent)["JobState"] == "COMPLETED"
    job.wait_ready(restart=1)
    assert "stopped after a checkpoint; requeued" in job.log()


def test_a_job_preempted_without_warning_comes_back_too(sbatch, cluster):
    with cluster.settings("SlurmctldParameters=preempt_send_user_signal", ""):
        job = sbatch(options=("--exclusive",))
        job.wait_ready()
        urgent = cluster.run(
            "sbatch", "--parsable", "-p", "high", "-N3", "--exclusive", "-o", "/dev/null", "--wrap", "true"
        ).strip()
        assert cluster.wait_job(urgent)["JobState"] == "COMPLETED"
        job.wait_ready(restart=1)
    assert "pre-empted without warning; requeued" in job.log()


def test_requeueing_ends_at_the_users_limit(sbatch):
    job = sbatch(environ={"SLURM_RESTART_COUNT": "5"})  # Slurm sets it only from the first restart on
    job.wait_ready(restart=5)
    job.signal("USR1")
    assert job.wait()["ExitCode"] == "75:0"
    assert "not requeued: MAX_RESTARTS=2" in job.log()


def test_scontrol_requeue_starts_the_job_again(sbatch, cluster):
    job = sbatch()
    job.wait_ready()
    cluster.run("scontrol", "requeue", job.number)
    job.wait_ready(restart=1)


def test_scancel_ends_it_soon(sbatch, cluster):
    job = sbatch()
    job.wait_ready()
    cluster.run("scancel", job.number)
    began = time.monotonic()
    assert job.wait()["JobState"] == "CANCELLED"
    assert cluster.left() == []
    assert time.monotonic() - began < 15


def test_after_a_node_lost_its_power_the_job_waits_for_nodes_and_starts_again(sbatch, cluster):
    job = sbatch(nodes=3)
    job.wait_ready(num_ranks=3)
    cluster.power_off("n3")
    try:
        job.wait_for(lambda: cluster.job(job.number)["Restarts"] == "1")
    finally:
        cluster.power_on("n3")
    job.wait_ready(restart=1, num_ranks=3)


def test_a_node_whose_link_is_cut_is_replaced_by_another(sbatch, cluster):
    job = sbatch()
    job.wait_ready()
    cluster.cut("n2")
    try:
        job.wait_for(lambda: cluster.job(job.number)["Restarts"] == "1")
        assert [text.split()[0] for text in job.wait_ready(restart=1)] == ["n1", "n3"]
    finally:
        cluster.heal("n2")
