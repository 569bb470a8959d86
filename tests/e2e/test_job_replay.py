"""Real runs looked into afterwards: steps made again, on other backends too, and where a number stopped being one."""

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from job import BIN, ROOT, SHM, Job, environment, launcher
from test_job_tasks import run  # noqa: F401 (a fixture)
from unlucky_loss import FIRST_OF_ANSWER, UNLUCKY

from rlhf_mp.data import step_batch

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]
TOLERANCE = 1e-5


def replayed(run_dir: Path, step: int, *words: str, num_ranks: int = 1) -> tuple[dict, str, int]:
    """What was found, what was printed and the exit code."""
    out = run_dir / "replay.json"
    out.unlink(missing_ok=True)
    script = [str(ROOT / "launch" / "replay.py"), str(run_dir), "--step", str(step), "--json", str(out), *words]
    done = subprocess.run(
        [*launcher(num_ranks), *script],
        env=environment(), cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert list(SHM.glob(f"deepspeed_*_{launcher(2)[-1]}_*")) == []  # it has no guard that would tidy up
    return json.loads(out.read_text()), done.stdout, done.returncode


@pytest.fixture(scope="module")
def tuned(run, tmp_path_factory) -> Job:  # noqa: F811
    """Six steps of fine-tuning on two DeepSpeed ranks, ZeRO-3 with both offloads, written in the background."""
    return run(
        "sft", tmp_path_factory.mktemp("tuned") / "run", "trainer.total_training_steps=6", "trainer.save_batches=all",
        "trainer.async_save=true", "trainer.max_actor_ckpt_to_keep=9",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=constant",
    )  # fmt: skip


def test_steps_are_made_again_bit_for_bit(tuned):
    for step, before in ((3, []), (4, [3]), (6, [5])):
        found, printed, code = replayed(tuned.run_dir, step, num_ranks=2)
        assert (code, found["start"]["before"]) == (0, before), printed
        assert set(found["differences"].values()) == {0.0}
        assert {"train/loss", "train/grad_norm", "train/lr"} <= found["logged"].keys() == found["metrics"].keys()
        assert found["found"] == found["bad_weights"] == [] and "to the last bit" in printed


@pytest.mark.parametrize(
    "strategy", ["torch", *(pytest.param(s, marks=pytest.mark.long) for s in ("deepspeed", "megatron"))]
)
def test_a_step_is_the_same_on_another_backend_and_another_number_of_ranks(tuned, strategy):
    if strategy == "megatron" and find_spec("mbridge") is None:
        pytest.skip("Megatron is not installed")
    found, printed, code = replayed(tuned.run_dir, 4, "--strategy", strategy)
    assert code == 0, printed
    differences = found["differences"]
    assert {"train/loss", "train/grad_norm"} <= differences.keys()
    assert max(differences.values()) <= TOLERANCE
    assert not (tuned.run_dir / ".replay_4").exists()


def test_a_step_without_its_batch_is_told_with_those_there_are(tuned):
    done = subprocess.run(
        [str(BIN / "python"), str(ROOT / "launch" / "replay.py"), str(tuned.run_dir), "--step", "99"],
        env=environment(), cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2 and "its batch was not kept; those of steps 3, 4, 5, 6 were" in done.stderr


@pytest.mark.long
def test_a_run_goes_on_with_half_the_ranks(tuned, run, tmp_path):  # noqa: F811
    words = ["actor_rollout_ref.actor.optim.lr_scheduler_type=constant"]
    run("sft", tmp_path / "run", "trainer.total_training_steps=4", *words)
    job = run("sft", tmp_path / "run", "trainer.total_training_steps=6", *words, num_ranks=1)
    assert "written by 2 rank(s), resumed by 1" in job.output()
    for name in ("train/loss", "train/grad_norm"):
        straight, resumed = ([one.steps()[step][name] for step in (5, 6)] for one in (tuned, job))
        assert resumed == pytest.approx(straight, abs=TOLERANCE)


@pytest.fixture(scope="module")
def unlucky(start, tmp_path_factory) -> Job:
    """Seven steps of GRPO, an epoch of which one step has a loss that is no number; two ranks."""
    job = start(tmp_path_factory.mktemp("unlucky") / "run", *UNLUCKY_RUN, "trainer.total_training_steps=6", num_ranks=2)
    assert job.wait() == 0, job.output()
    job.assert_nothing_left()
    return job


UNLUCKY_RUN = (
    "actor_rollout_ref.actor.policy_loss=tests.e2e.unlucky_loss:ppo_clip_but_unlucky",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",  # one update a step
    "trainer.save_batches=all",
    "trainer.save_freq=2",
    "trainer.max_actor_ckpt_to_keep=9",
)


def skipped_steps(job: Job) -> list[int]:
    return [step for step, record in job.steps().items() if record["actor/skipped_updates"]]


@pytest.mark.long
def test_the_step_that_was_no_number_was_skipped_and_the_others_made(unlucky):
    (bad,) = skipped_steps(unlucky)
    told = f"step {bad}: 1 of 1 updates of the actor skipped: their loss or gradient is no finite number"
    assert told in unlucky.output()
    assert all(record["actor/loss"] == record["actor/loss"] for s, record in unlucky.steps().items() if s != bad)
    assert list(unlucky.steps()) == list(range(1, 7))


@pytest.mark.long
def test_a_replay_names_the_tokens_where_it_begins(unlucky):
    (bad,) = skipped_steps(unlucky)
    found, printed, code = replayed(unlucky.run_dir, bad, num_ranks=2)
    assert code == 0, printed
    assert found["found"], printed
    parts = step_batch.read(step_batch.folder_of(unlucky.run_dir, bad))
    for one in found["found"]:
        tokens = parts[one["dp_rank"]].batch.tokens[one["finding"]["row"]]
        assert tuple(tokens[:FIRST_OF_ANSWER].tolist()) == UNLUCKY
        assert (one["finding"]["what"], one["finding"]["tokens"]) == ("the loss", [FIRST_OF_ANSWER])
    assert f"token {FIRST_OF_ANSWER} (" in printed


@pytest.mark.long
def test_a_healthy_step_of_reinforcement_learning_is_made_again(unlucky):
    step = max(step for step in unlucky.steps() if step not in skipped_steps(unlucky))
    found, printed, code = replayed(unlucky.run_dir, step, num_ranks=2)
    assert code == 0 and set(found["differences"].values()) == {0.0}, printed
    compared = {"actor/loss", "actor/grad_norm", "actor/kl_to_reference", "actor/approx_kl", "actor/entropy"}
    assert compared <= found["differences"].keys()
    other, printed, code = replayed(unlucky.run_dir, step, "--strategy", "torch")
    assert code == 0 and max(other["differences"].values()) <= TOLERANCE, printed


@pytest.mark.long
def test_so_many_in_a_row_end_the_run_and_the_batch_can_be_looked_into(unlucky, start):
    job = start(
        unlucky.run_dir, *UNLUCKY_RUN, "trainer.total_training_steps=20", "trainer.max_skipped_updates=1", num_ranks=2
    )
    assert job.wait() == 1
    job.assert_nothing_left()
    bad = max(skipped_steps(job))
    assert f"1 updates of the actor in a row skipped, the last in step {bad}" in job.output()
    assert f"checkpoints/global_step_{bad:06d}" in job.output()
    found, printed, _ = replayed(unlucky.run_dir, bad, num_ranks=2)
    assert found["start"]["checkpoint"].endswith(f"global_step_{bad:06d}") and found["found"], printed
