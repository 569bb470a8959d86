"""configs/gsm8k_tiny.yaml as its head says: real problems, a tokenizer made from them, the math reward."""

import json
from pathlib import Path

import pytest
from job import ROOT, Job

from rlhf_mp.models import tiny

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]
DATA = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k"


@pytest.mark.skipif(not DATA.is_dir(), reason=f"needs GSM8K's train.jsonl and test.jsonl in {DATA}")
def test_two_steps_of_the_rehearsal(tmp_path):
    model = tmp_path / "model"
    tiny.main(["--tokenizer-from", str(DATA / "train.jsonl"), "--text-keys", "question,answer", "--out", str(model)])
    job = Job(
        tmp_path / "run",
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={DATA / 'train.jsonl'}",
        f"data.val_files={DATA / 'test.jsonl'}",
        "trainer.total_training_steps=2",
        num_ranks=2,
        config=ROOT / "configs" / "gsm8k_tiny.yaml",
    )
    try:
        assert job.wait() == 0, job.output()
        job.assert_nothing_left()
    finally:
        job.stop()
    assert list(job.steps()) == [1, 2]
    assert all(record["rollout/response_tokens"] > 64 for record in job.steps().values())
    assert "eval/accuracy_last" in job.summary()
    samples = [json.loads(line) for line in (job.run_dir / "samples.jsonl").read_text().splitlines()]
    questions = (DATA / "train.jsonl").read_text() + (DATA / "test.jsonl").read_text()
    assert all(
        json.dumps(sample["prompt"].split(":")[1].split("\n")[0].strip())[1:20] in questions for sample in samples
    )
