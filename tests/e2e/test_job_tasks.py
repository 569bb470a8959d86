"""Tasks without sampling as a user starts them: two DeepSpeed ranks, no Ray, no SGLang, resumed and exported."""

import json
from pathlib import Path

import pytest
from job import ROOT, Job
from transformers import AutoModelForSequenceClassification

from rlhf_mp.quickstart import preferences, written

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]
ADDITIONS = [{"prompt": f"{a}+{b}=", "answer": written(a + b)} for a in range(10) for b in range(10)]


@pytest.fixture(scope="module")
def run(tiny_checkpoint: Path, tmp_path_factory):
    """``run(task, run_dir, *overrides)``: the job, once it has ended well."""
    folder = tmp_path_factory.mktemp("tasks")
    pairs = preferences(ADDITIONS, seed=0)
    for name, rows in {"rows": ADDITIONS, "pairs": pairs}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def job(task: str, run_dir: Path, *overrides: str, num_ranks: int = 2) -> Job:
        data = folder / ("rows.jsonl" if task == "sft" else "pairs.jsonl")
        started = Job(
            run_dir,
            f"actor_rollout_ref.model.path={tiny_checkpoint}",
            f"data.train_files={data}",
            f"data.val_files={data}",
            "data.train_batch_size=32",
            "trainer.val_before_train=true",
            "trainer.test_freq=2",
            "trainer.save_freq=2",
            *overrides,
            num_ranks=num_ranks,
            config=ROOT / "configs" / f"{'rm' if task == 'reward_model' else task}_quickstart.yaml",
        )
        try:
            assert started.wait() == 0, started.output()
            started.assert_nothing_left()
        finally:
            started.stop()
        return started

    return job


def test_fine_tuning_learns_and_a_resumed_run_is_bit_identical(run, tmp_path):
    constant = "actor_rollout_ref.actor.optim.lr_scheduler_type=constant"  # a cosine ends with the run
    whole = run("sft", tmp_path / "whole", "trainer.total_training_steps=4", constant)
    losses = [record["eval/loss"] for record in whole.metrics() if "eval/loss" in record]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert whole.summary()["num_steps"] == 4 and "validation loss" in whole.output()

    run("sft", tmp_path / "cut", "trainer.total_training_steps=2", constant)
    cut = run("sft", tmp_path / "cut", "trainer.total_training_steps=4", constant)
    assert "resumed from" in cut.output()
    for name in ("train/loss", "train/grad_norm"):
        assert [r[name] for r in cut.steps().values()] == [r[name] for r in whole.steps().values()]


def test_a_reward_model_run_leaves_what_transformers_loads_and_starts_no_engine(run, tmp_path):
    job = run("reward_model", tmp_path / "run", "trainer.total_training_steps=4")
    model = AutoModelForSequenceClassification.from_pretrained(job.run_dir / "huggingface")
    assert model.config.num_labels == 1 and model.score.weight.abs().max() > 0
    assert sorted(p.name for p in (job.run_dir / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]
    assert job.summary()["eval/accuracy_first"] == 0.5
