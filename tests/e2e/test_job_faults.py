"""Whatever dies in the middle of a step, the job ends soon, says first what it was, and leaves nothing."""

import os
import re
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest
from job import Job

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]
LIMIT_S = 30
PHASE_S = 180  # the start must be over by then too, on a busy machine
KILLED = "died without a word, killed by SIGKILL"


class Fault(NamedTuple):
    strike: Callable[[Job], None]
    said: str  # regular expression
    log: str | None  # whose end is shown
    num_ranks: int


def kill(find: Callable[[Job], int]) -> Callable[[Job], None]:
    return lambda job: os.kill(find(job), signal.SIGKILL)


INTERRUPTED = r"interrupted: (rank [01] \(pid \d+\) was ended by SIG(INT|TERM)|the launcher of rank [01] )"

FAULTS = {
    "rank 1": Fault(kill(lambda job: job.rank(1)), rf"rank 1 \(pid \d+\): {KILLED}", "rank_1", 2),
    "rank 0": Fault(kill(lambda job: job.rank(0)), rf"rank 0 \(pid \d+\): {KILLED}", "rank_0", 2),
    "Ctrl-C": Fault(
        lambda job: os.killpg(job.launcher.pid, signal.SIGINT),
        INTERRUPTED,
        None,
        2,
    ),
    "kill of the launcher": Fault(lambda job: os.kill(job.launcher.pid, signal.SIGTERM), INTERRUPTED, None, 2),
    "scheduler": Fault(
        kill(lambda job: job.titled("^ray::SchedulerActor")),
        "the rollout scheduler: its process was killed or crashed",
        "scheduler",
        1,
    ),
    "engine": Fault(
        kill(lambda job: job.titled(r"sglang\.launch_server")), "SGLang engine 0: was killed by SIGKILL", "engine_0", 1
    ),
    "engine's worker": Fault(
        kill(lambda job: job.titled("^sglang::scheduler")),
        "SGLang engine 0: (was killed by|exited with code)",
        "engine_0",
        1,
    ),
}


TWINS = {"rank 0", "kill of the launcher", "engine's worker"}
"""Each has another fault above that strikes the same part."""
CASES = [
    pytest.param(fault, id=name, marks=pytest.mark.long if name in TWINS else ()) for name, fault in FAULTS.items()
]


@pytest.mark.parametrize("fault", CASES)
def test_a_death_ends_the_job_and_is_named_first(start, tmp_path, fault):
    job = start(
        tmp_path / "run",
        "trainer.total_training_steps=1000",
        "trainer.val_before_train=false",
        "trainer.max_engine_restarts=0",
        num_ranks=fault.num_ranks,
    )
    job.wait_for_step(1)
    before = len(job.output())
    fault.strike(job)
    struck = time.monotonic()
    assert job.wait() != 0
    job.assert_nothing_left()
    assert time.monotonic() - struck < LIMIT_S
    said = re.search(rf"^{fault.said}", job.output()[before:], re.MULTILINE)
    assert said, job.output()[before:]
    assert "rlhf_mp/" not in job.output()[before:][: said.start()]  # a traceback of ours
    assert re.match(fault.said.partition(":")[0], job.first_failure()["what"])
    if fault.log:
        assert re.search(rf"^(Last lines of|Its log) {job.run_dir}/logs/{fault.log}\.log", job.output(), re.MULTILINE)


def test_a_rank_that_hangs_ends_the_job_and_the_logs_say_where_every_rank_was(start, tmp_path):
    job = start(
        tmp_path / "run",
        "trainer.val_before_train=false",
        f"trainer.phase_timeout_s={PHASE_S}",
        "actor_rollout_ref.actor.policy_loss=tests.e2e.hanging_loss:ppo_clip_but_hanging",
        num_ranks=2,
    )
    assert job.wait() != 0
    job.assert_nothing_left()
    told = f"phase train lasted longer than {PHASE_S} s (trainer.phase_timeout_s)"
    assert re.search(rf"^rank [01]: {re.escape(told)}", job.output(), re.MULTILINE), job.output()
    logs = [(job.run_dir / "logs" / f"rank_{rank}.log").read_text() for rank in (0, 1)]
    assert "in train_step" in logs[0]
    assert "in never_returns" in logs[1] and "hanging_loss.py" in logs[1]
