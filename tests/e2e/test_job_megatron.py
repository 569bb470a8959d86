"""The same run on Megatron, after each checkpoint in another layout, by another transport: the numbers agree."""

from importlib.util import find_spec

import pytest
from job import Job
from safetensors.torch import load_file

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(find_spec("mbridge") is None, reason="Megatron is not installed"),
]
NUM_STEPS = 6
ACTOR = "actor_rollout_ref.actor"
MEGATRON = [
    f"{ACTOR}.strategy=megatron",
    f"{ACTOR}.fsdp_config.param_offload=false",
    f"{ACTOR}.fsdp_config.optimizer_offload=false",
]
TP2 = [*MEGATRON, f"{ACTOR}.megatron.tensor_model_parallel_size=2"]
PP2 = [*MEGATRON, f"{ACTOR}.megatron.pipeline_model_parallel_size=2"]
ON_HOST = f"{ACTOR}.fsdp_config.optimizer_offload=true"
TRANSPORT = "actor_rollout_ref.weight_sync.transport"
ENGINE_OF_TWO = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
PARTS = {
    2: [*TP2, f"{TRANSPORT}=tensor"],
    4: [*PP2, ON_HOST, f"{TRANSPORT}=disk", ENGINE_OF_TWO],
    6: [*TP2, f"{TRANSPORT}=distributed", ENGINE_OF_TWO],
}
"""By the step that each ends with."""


@pytest.fixture(scope="module")
def jobs(start, tmp_path_factory) -> tuple[Job, Job]:
    """In one process, and on two Megatron ranks: a third of the steps each way."""
    folder = tmp_path_factory.mktemp("megatron")

    def finished(name: str, num_steps: int, *words: str, num_ranks: int) -> Job:
        job = start(folder / name, f"trainer.total_training_steps={num_steps}", *words, num_ranks=num_ranks)
        assert job.wait() == 0, job.output()
        job.assert_nothing_left()
        return job

    for num_steps, words in PARTS.items():
        megatron = finished("megatron", num_steps, *words, num_ranks=2)
    return finished("torch", NUM_STEPS, num_ranks=1), megatron


def test_each_layout_continues_from_the_checkpoint_of_the_one_before(jobs):
    _, megatron = jobs
    for step in (2, 4):
        assert f"resumed from {megatron.run_dir}/checkpoints/global_step_{step:06d} at step {step}" in megatron.output()


def test_every_step_samples_and_trains_alike(jobs):
    torch, megatron = (job.steps() for job in jobs)
    assert list(torch) == list(megatron) == list(range(1, NUM_STEPS + 1))
    for step in torch:
        for name in ("rollout/reward_mean", "rollout/response_tokens", "actor/lr"):
            assert megatron[step][name] == torch[step][name], (step, name)
        for name in ("actor/loss", "actor/grad_norm", "actor/entropy"):
            assert megatron[step][name] == pytest.approx(torch[step][name], abs=1e-4), (step, name)
        assert megatron[step]["sync/canary_logprob_diff"] < 1e-4


def test_tokens_are_counted_once_however_many_ranks_share_them(jobs):
    torch, megatron = (job.steps() for job in jobs)
    assert {step: m["train/tokens"] for step, m in torch.items()} == {
        step: m["train/tokens"] for step, m in megatron.items()
    }


def test_the_exported_checkpoint_is_the_same_model(jobs):
    torch, megatron = (load_file(*(job.run_dir / "huggingface").glob("model*.safetensors")) for job in jobs)
    assert torch.keys() == megatron.keys()
    assert max((torch[name] - megatron[name]).abs().max().item() for name in torch) < 1e-4


def test_checkpoints_and_exports_take_the_disk_that_was_planned(jobs):
    for job in jobs:
        job.assert_disk_as_planned()
