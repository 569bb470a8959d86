"""An engine that is wider than a machine: its workers on two, and what becomes of it when one half dies."""

import pytest

from rlhf_mp.observe.sinks import read_jsonl

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600), pytest.mark.usefixtures("nothing_left")]
ROLLOUT = "actor_rollout_ref.rollout"
START_S = 1500  # half a minute; a busy machine must not look like a hang


def test_half_of_an_engine_dies_and_the_whole_one_is_restarted(sbatch, cluster):
    job = sbatch(
        f"{ROLLOUT}.tensor_model_parallel_size=2",
        f"{ROLLOUT}.allow_cross_node=true",
        "trainer.total_training_steps=6",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        environ={"RLHF_MP_SCRIPT": "launch/train.py"},
    )

    def records() -> list[dict]:
        file = job.run_dir / "metrics.jsonl"
        return [r for r in read_jsonl(file) if "time/step_s" in r] if file.exists() else []

    job.wait_for(records, START_S)
    servers = [cluster.run("pgrep", "-f", "sglang.launch_server", on=node).split() for node in ("n1", "n2")]
    assert [len(pids) for pids in servers] == [1, 1]
    cluster.run("kill", "-9", *servers[1], on="n2")
    ended = job.wait(START_S)
    assert ended["JobState"] == "COMPLETED", job.everything_said()
    assert [record["step"] for record in records()] == [1, 2, 3, 4, 5, 6]
    assert all(record["sync/changed_tensors_fraction"] > 0 for record in records())
    said = job.output("n1")
    assert "SGLang engine 0: its part on machine 2 of 2 was killed by SIGKILL" in said
    assert "answers again after restart 1" in said
    logs = {log.name for log in (job.run_dir / "logs").glob("engine_*.log")}
    starts = ("engine_0", "engine_0_restart_1")
    assert logs == {f"{start}{part}.log" for start in starts for part in ("", "_machine_2")}
