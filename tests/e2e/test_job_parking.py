"""PPO whose ranks and engines hand memory to each other computes what it computes when everybody keeps it."""

import pytest
import torch
from job import ENGINE_ROUNDING, Job
from safetensors.torch import load_file

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]
PPO = [
    "algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=true", "trainer.total_training_steps=4",
    "trainer.test_freq=2", "trainer.save_freq=2",
]  # fmt: skip
TAKE_TURNS = ["trainer.offload_during_rollout=true", "actor_rollout_ref.rollout.free_cache_engine=true"]
COMPARED = ("rollout/", "actor/", "critic/", "eval/", "score/")


@pytest.fixture(scope="module")
def runs(start, inputs, tmp_path_factory) -> tuple[Job, Job]:
    """One in which all keep their memory, one in which they take turns. Both save in the middle."""
    folder = tmp_path_factory.mktemp("parking")
    (model,) = (word.partition("=")[2] for word in inputs if word.startswith("actor_rollout_ref.model.path="))

    def finished(name: str, *words: str) -> Job:
        job = start(folder / name, *PPO, f"critic.model.path={model}", *words, num_ranks=2)
        assert job.wait() == 0, job.output()
        job.assert_nothing_left()
        return job

    return finished("kept"), finished("parked", *TAKE_TURNS)


def computed(job: Job) -> list[dict]:
    def is_compared(name: str) -> bool:
        return name.startswith(COMPARED) and not name.endswith("_s") and not name.startswith(ENGINE_ROUNDING)

    return [{name: value for name, value in record.items() if is_compared(name)} for record in job.metrics()]


def test_every_metric_and_every_weight_is_the_same(runs):
    kept, parked = map(computed, runs)
    assert kept == parked
    assert len({record["actor/loss"] for record in runs[0].steps().values()}) == 4
    ours, theirs = (load_file(job.run_dir / "huggingface" / "model-00001.safetensors") for job in runs)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_what_moved_and_how_fast_is_in_the_metrics(runs):
    kept, parked = (job.steps() for job in runs)
    assert not [name for record in kept.values() for name in record if name.startswith("park/")]
    model = sum(t.nbytes for t in load_file(runs[0].run_dir / "huggingface" / "model-00001.safetensors").values())
    for record in parked.values():
        # of two ranks each: moments and masters of actor and critic, weights of critic and reference, by half
        assert record["park/copied_bytes"] > 4 * model
        assert record["park/freed_bytes"] > record["park/copied_bytes"]
        assert record["park/out_gb_per_s"] > 0 and record["park/back_gb_per_s"] > 0 and record["sleep/s"] > 0
