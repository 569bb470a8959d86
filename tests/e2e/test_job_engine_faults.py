"""Engines die and hang in the middle of a run: it goes on, and ends with the same weights as without the faults."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from job import ENGINE_ROUNDING, Job
from safetensors.torch import load_file

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]
GROUPS = 8  # a step, see additions.py
COMPARED = ("actor/", "rollout/reward", "rollout/response", "rollout/solved", "eval/", "score/")
LIMIT_S = 30
COMMON = [
    "trainer.device=cpu",
    "trainer.val_before_train=false",
    "reward.name=math",  # the default: the reward is a term
    "actor_rollout_ref.rollout.max_num_seqs=4",  # a group at a time: when the first is judged, others wait or are drawn
    "actor_rollout_ref.rollout.health_check_interval_s=1",
    "actor_rollout_ref.rollout.health_check_timeout_s=10",
]


def call(step: int, group: int) -> int:
    """The so-manieth judgement of a run; steps and groups count from 1."""
    return (step - 1) * GROUPS + group


@pytest.fixture(scope="module")
def run(start, tmp_path_factory) -> Callable[..., Job]:
    folder = tmp_path_factory.mktemp("faults")

    def started(name: str, num_steps: int, script: list, *overrides: str, num_ranks: int = 1) -> Job:
        args = json.dumps({"script": script, "run_dir": str(folder / name)})
        reward = f'{{name: "tests.e2e.striking:score", args: {args}, timeout_s: 300}}'
        words = [f"reward.terms=[{reward}]", f"trainer.total_training_steps={num_steps}", *COMMON, *overrides]
        return start(folder / name, *words, num_ranks=num_ranks)

    return started


def ended_well(job: Job) -> Job:
    assert job.wait() == 0, job.output()
    job.assert_nothing_left()
    return job


def weights(job: Job) -> dict[str, torch.Tensor]:
    (file,) = (job.run_dir / "huggingface").glob("model*.safetensors")
    return load_file(file)


def computed(job: Job) -> list[dict]:
    return [
        {
            k: v
            for k, v in record.items()
            if k == "step" or k.startswith(COMPARED) and not k.endswith("_s") and not k.startswith(ENGINE_ROUNDING)
        }
        for record in job.metrics()
    ]


def assert_same(faulty: Job, straight: Job) -> None:
    assert computed(faulty) == computed(straight)
    there, here = weights(straight), weights(faulty)
    assert there.keys() == here.keys()
    assert [name for name in there if not there[name].equal(here[name])] == []


def said(job: Job) -> list[str]:
    """What the user read about engines, in order."""
    return re.findall(r"^SGLang engine (\d: [^\n]*?)(?: \(trainer[^\n]*)?$", job.output(), re.MULTILINE)


TWO = [
    "actor_rollout_ref.rollout.num_engines=2",
    "actor_rollout_ref.weight_sync.transport=disk",
    "actor_rollout_ref.rollout.val_kwargs.n=8",  # a validation that lasts
    "actor_rollout_ref.rollout.val_kwargs.temperature=1",
]
STEPS = 10
FAULTS = [
    [call(2, 1), "SIGKILL", 0],  # in the middle of a rollout
    [call(2, 8), "wait", "engine 0: answers again after restart 1"],
    [call(4, 1), "SIGSTOP", 1],  # it hangs
    [call(4, 8), "wait", "engine 1: answers again after restart 1"],
    [call(6, 1), "swap", 0],
    [call(7, 8), "wait", "engine 0: was killed by SIGKILL; restart 2 of 3"],
    [call(10, 8), "wait", "engine 0: answers again after restart 2"],
    [call(STEPS, GROUPS) + 1, "SIGKILL", 0],  # in the validation at the end, both
    [call(STEPS, GROUPS) + 1, "SIGKILL", 1],
]


@pytest.fixture(scope="module")
def straight(run) -> Job:
    return ended_well(run("straight", STEPS, [], *TWO))


@pytest.fixture(scope="module")
def faulty(run) -> Job:
    return ended_well(run("faulty", STEPS, FAULTS, *TWO))


@pytest.mark.long
def test_with_all_these_faults_the_run_ends_bit_for_bit_as_without_them(straight, faulty):
    assert_same(faulty, straight)
    assert straight.metrics()[-1]["eval/accuracy"] == faulty.metrics()[-1]["eval/accuracy"]


@pytest.mark.long
def test_the_user_reads_which_engine_what_happened_and_where_its_logs_are(faulty):
    restarts = [line for line in said(faulty) if "; restart " in line]
    assert restarts[:3] == [
        "0: was killed by SIGKILL; restart 1 of 3",
        "1: /server_info gave no answer in 10 s (actor_rollout_ref.rollout.health_check_timeout_s); restart 1 of 3",
        "0: was killed by SIGKILL; restart 2 of 3",
    ]
    assert sorted(restarts[3:]) == [
        "0: was killed by SIGKILL; restart 3 of 3",
        "1: was killed by SIGKILL; restart 2 of 3",
    ]
    logs = faulty.run_dir / "logs"
    assert f"what it wrote before: {logs}/engine_0.log" in faulty.output()
    assert f"what it writes now: {logs}/engine_0_restart_1.log" in faulty.output()
    assert sorted(path.name for path in logs.glob("engine_*_restart_*.log")) == [
        "engine_0_restart_1.log",
        "engine_0_restart_2.log",
        "engine_0_restart_3.log",
        "engine_1_restart_1.log",
        "engine_1_restart_2.log",
    ]


@pytest.mark.long
def test_metrics_tell_restarts_resampled_groups_and_the_seconds_an_engine_was_out(straight, faulty):
    def by_step(job: Job, name: str) -> dict[int, float]:
        return {step: record[f"rollout/{name}"] for step, record in job.steps().items() if record[f"rollout/{name}"]}

    assert {name: by_step(straight, name) for name in ("engine_restarts", "resampled_groups", "engine_out_s")} == {
        "engine_restarts": {},
        "resampled_groups": {},
        "engine_out_s": {},
    }
    assert by_step(faulty, "engine_restarts") == {2: 1, 4: 1, 7: 1}
    resampled = by_step(faulty, "resampled_groups")
    assert set(resampled) == {2, 4} and all(1 <= count <= GROUPS // 2 for count in resampled.values())
    assert set(by_step(faulty, "engine_out_s")) <= {3, 5, *range(8, STEPS + 1)}
    assert all(2 < seconds < 120 for seconds in by_step(faulty, "engine_out_s").values())


def test_the_only_engine_of_two_ranks_is_killed_and_the_ranks_push_the_same_version_again(run):
    """DeepSpeed ZeRO-3: pushing takes both ranks, which wait for samples when the engine comes back."""
    straight = ended_well(run("straight_2", 4, [], num_ranks=2))
    faulty = ended_well(run("faulty_2", 4, [[call(3, 1), "SIGKILL", 0]], num_ranks=2))
    assert_same(faulty, straight)
    assert [line for line in said(faulty) if "; restart " in line] == ["0: was killed by SIGKILL; restart 1 of 3"]
    struck = faulty.steps()[3]
    assert struck["rollout/resampled_groups"] >= 1 and struck["rollout/engine_out_s"] > 2
    assert struck["time/rollout_s"] > struck["rollout/engine_out_s"] - 1  # the run had to wait


@pytest.mark.long
def test_restarts_that_are_used_up_end_the_run_with_the_engine_and_its_last_log(run):
    script = [[call(2, 1), "SIGKILL", 0], [call(4, 1), "SIGKILL", 0]]
    job = run("used_up", 1000, script, "trainer.max_engine_restarts=1")
    assert job.wait() != 0
    ended = time.time()
    times = [float(line.split()[0]) for line in Path(job.run_dir, "struck").read_text().splitlines()]
    job.assert_nothing_left()
    assert len(times) == 2 and ended - times[1] < LIMIT_S
    last = "SGLang engine 0: was killed by SIGKILL, after 1 restart(s) (trainer.max_engine_restarts)"
    assert last in job.output() and job.first_failure()["what"] == "SGLang engine 0"
    assert re.search(
        rf"^(Last lines of|Its log) {job.run_dir}/logs/engine_0_restart_1\.log", job.output(), re.MULTILINE
    )
