"""LoRA from start to finish: two DeepSpeed ranks, ZeRO-3 with both offloads, real engines, a stop and a resume."""

from pathlib import Path

import pytest
import torch
from job import Job
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]
LORA = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=16", "trainer.test_freq=2"]


@pytest.fixture(scope="module")
def runs(start, tmp_path_factory) -> tuple[Job, Job]:
    """Four steps straight, and two, a stop and two more."""
    folder = tmp_path_factory.mktemp("lora")

    def finished(name: str, num_steps: int) -> Job:
        job = start(folder / name, *LORA, f"trainer.total_training_steps={num_steps}", num_ranks=2)
        assert job.wait() == 0, job.output()
        job.assert_nothing_left()
        return job

    straight = finished("straight", 4)
    finished("resumed", 2)
    return straight, finished("resumed", 4)


def weights(job: Job) -> dict[str, torch.Tensor]:
    return load_file(job.run_dir / "huggingface" / "model-00001.safetensors")


def test_a_resumed_adapter_ends_where_a_straight_run_does(runs):
    straight, resumed = runs
    assert "resumed from" in resumed.output()
    ours, theirs = weights(resumed), weights(straight)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    losses = [[job.steps()[step]["actor/loss"] for step in range(1, 5)] for job in runs]
    assert losses[0] == losses[1] and len(set(losses[0])) == 4


def test_checkpoints_hold_the_adapter_alone(runs):
    files = [f for f in (runs[0].run_dir / "checkpoints" / "global_step_000004" / "actor").rglob("*.pt")]
    model = sum(tensor.nbytes for tensor in weights(runs[0]).values())
    assert files and sum(file.stat().st_size for file in files) < model / 2  # moments and copies of all it trains


def test_the_reference_is_the_base_and_holds_nothing_and_the_adapters_states_are_as_planned(runs):
    steps = runs[0].steps()
    assert 0 <= steps[1]["actor/kl_to_reference"] < steps[4]["actor/kl_to_reference"]
    memory = {row["what"]: row for row in runs[0].summary()["memory"]}
    assert [what for what in memory if "reference" in what] == []
    for what in ("actor weights on host", "actor optimizer moments on host"):
        assert abs(memory[what]["difference"]) < 0.05


def test_merged_checkpoint_and_peft_adapter_are_the_same_model(runs, inputs):
    folder, model = runs[0].run_dir, Path(inputs[0].partition("=")[2])
    merged = AutoModelForCausalLM.from_pretrained(folder / "huggingface", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, folder / "huggingface_adapter").merge_and_unload()
    start = load_file(model / "model.safetensors")
    for (name, ours), (other, theirs) in zip(merged.named_parameters(), adapted.named_parameters(), strict=True):
        assert name == other
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
        assert torch.equal(ours, start[name]) != name.endswith("_proj.weight")


def test_a_checkpoint_of_another_adapter_is_refused_before_anything_starts(runs, start):
    words = ["actor_rollout_ref.model.lora_alpha=32", "trainer.total_training_steps=5"]
    job = start(runs[1].run_dir, *LORA, *words, num_ranks=2)
    assert job.wait() == 2
    assert "was written with actor_rollout_ref.model.lora_alpha = 16, this run has 32" in job.output()


def test_a_swap_of_the_adapter_alone_trains_alike_with_less_on_the_way(runs, start, tmp_path):
    words = ["actor_rollout_ref.weight_sync.adapter_only=true", "actor_rollout_ref.rollout.free_cache_engine=true"]
    words.append("trainer.total_training_steps=2")
    job = start(tmp_path / "run", *LORA, *words, num_ranks=2)
    assert job.wait() == 0, job.output()
    job.assert_nothing_left()
    merged, alone = runs[0].steps(), job.steps()
    for step in (1, 2):
        assert alone[step]["sync/bytes"] < merged[step]["sync/bytes"] / 5
        assert alone[step]["sync/changed_tensors_fraction"] > 0
    assert alone[1]["actor/loss"] == pytest.approx(merged[1]["actor/loss"], abs=1e-5)
    assert weights(job).keys() == weights(runs[0]).keys()


def test_a_base_in_4_bits_on_one_rank(start, tmp_path):
    """Engines accept the unpacked, merged weights: the canary's log-probs differ by 1e-4 at most in float32."""
    words = ["actor_rollout_ref.model.quantization=nf4", "trainer.total_training_steps=2"]
    job = start(tmp_path / "run", *LORA, *words)
    assert job.wait() == 0, job.output()
    job.assert_nothing_left()
    assert len({job.steps()[step]["actor/loss"] for step in (1, 2)}) == 2
    assert AutoModelForCausalLM.from_pretrained(job.run_dir / "huggingface").dtype == torch.float32
