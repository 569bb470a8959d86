"""A run that cannot continue from its checkpoint is refused before anything is started."""

import json

import pytest

from rlhf_mp import checkpoint
from rlhf_mp.config.checkpoint_folder import checkpoint_problems, trained_facts
from rlhf_mp.config.load import config_from_dict

SMALL, LARGE = {"hidden_size": 64, "vocab_size": 96}, {"hidden_size": 128, "vocab_size": 96}


@pytest.fixture
def run(tmp_path):
    """A run directory, and ``problems(*overrides)`` of a run of the small model on two ranks in it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SMALL))

    class Run:
        folder = tmp_path / "run"

        def save(self, step, model=SMALL, num_ranks=2):
            folder = checkpoint.folder_of(self.folder, step)
            (checkpoint.start(folder) / "weights.pt").write_bytes(bytes(100))
            checkpoint.finish(folder, {"step": step, "model": model, "num_ranks": num_ranks})
            return folder

        def config(self, *overrides):
            tree = {
                "actor_rollout_ref": {"model": {"path": str(tmp_path / "model")}},
                "trainer": {"default_local_dir": str(self.folder), "n_gpus_per_node": 2},
            }
            return config_from_dict(tree, overrides)

        def problems(self, *overrides):
            return list(checkpoint_problems(self.config(*overrides)))

    return Run()


def path(folder):
    return "trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}"


def test_a_new_run_and_one_that_fits_have_no_problem(run):
    assert run.problems() == []
    folder = run.save(3)
    assert run.problems() == []
    assert run.problems(*path(folder)) == []


def test_a_truncated_checkpoint_cannot_be_asked_for(run):
    folder = run.save(3)
    (folder / "weights.pt").write_bytes(bytes(99))
    (problem,) = run.problems(*path(folder))
    assert problem.key == "trainer.resume_from_path"
    assert f"{folder / 'weights.pt'} has 99 bytes, 100 were written" in problem.reason


def test_the_newest_damaged_one_is_passed_over_for_the_one_before(run):
    run.save(3)
    (run.save(6) / "weights.pt").unlink()
    assert run.problems() == []


def test_only_damaged_ones_are_a_problem_unless_nothing_is_resumed(run):
    for step in (3, 6):
        (run.save(step) / checkpoint.MANIFEST).unlink()
    (problem,) = run.problems()
    assert all(f"global_step_{step:06d}/{checkpoint.MANIFEST}" in problem.reason for step in (3, 6))
    assert "trainer.resume_mode=disable" in problem.fix
    assert run.problems("trainer.resume_mode=disable") == []


@pytest.mark.parametrize(
    ("saved", "reason"),
    [
        ({"model": LARGE}, "is of another model, with {'hidden_size': 128}"),
        ({"num_ranks": 4}, "was written by 4 rank(s), this run has 2"),
    ],
)
def test_one_that_does_not_fit_is_named_however_it_was_chosen(run, saved, reason):
    run.save(3)
    folder = run.save(6, **saved)
    (found,) = run.problems()
    assert (found.key, found.found, found.reason) == ("trainer.resume_mode", "auto", f"{folder} {reason}")
    assert "trainer.experiment_name=<new name>" in found.fix and "trainer.default_local_dir" in found.fix
    (asked,) = run.problems(*path(folder))
    assert (asked.key, asked.reason) == ("trainer.resume_from_path", f"{folder} {reason}")


def test_everything_that_does_not_fit_is_said(run):
    run.save(3, model=LARGE, num_ranks=1)
    assert len(run.problems()) == 2


def test_a_folder_that_is_no_checkpoint(run):
    (problem,) = run.problems(*path(run.folder / "global_step_3"))
    assert problem.reason == "there is no such folder"
    (run.folder / "global_step_3").mkdir(parents=True)
    (problem,) = run.problems(*path(run.folder / "global_step_3"))
    assert "manifest.json" in problem.reason


RANK, ALPHA = "actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8"
SGD = "actor_rollout_ref.actor.optim.optimizer=sgd"
TARGETS = "actor_rollout_ref.model.target_modules=[q_proj]"


@pytest.mark.parametrize(
    ("then", "now", "told"),
    [
        ([RANK], [RANK], []),
        ([RANK], ["actor_rollout_ref.model.lora_rank=8"], ["actor_rollout_ref.model.lora_rank = 4, this run has 8"]),
        ([RANK], [RANK, ALPHA], ["actor_rollout_ref.model.lora_alpha = 16, this run has 8"]),
        ([RANK], [RANK, TARGETS], ["target_modules = ['all-linear'], this run has ['q_proj']"]),
        ([RANK], [], ["lora_rank = 4, this run has nothing"]),
        ([], [RANK], ["lora_rank = nothing, this run has 4"]),
        ([SGD], [SGD], []),
        ([SGD], [], ["optim.optimizer = sgd, this run has nothing"]),
        ([], [SGD], ["optim.optimizer = nothing, this run has sgd"]),
    ],
)
def test_an_adapter_and_an_optimizer_continue_only_as_themselves(run, then, now, told):
    folder = checkpoint.folder_of(run.folder, 3)
    checkpoint.start(folder)
    trained = trained_facts(run.config(*then))
    checkpoint.finish(folder, {"step": 3, "model": SMALL, "num_ranks": 2, "trained": trained})
    reasons = [problem.reason for problem in run.problems(*now)]
    assert bool(reasons) == bool(told)
    for words in told:
        assert any(words in reason for reason in reasons)


def test_an_adapter_does_not_continue_on_another_base_of_the_same_shape(run, tmp_path):
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(bytes(1_000_000))
    folder = checkpoint.folder_of(run.folder, 3)
    checkpoint.start(folder)
    state = {"step": 3, "model": SMALL, "num_ranks": 2, "trained": trained_facts(run.config(RANK))}
    checkpoint.finish(folder, state)
    assert run.problems(RANK) == []
    weights.write_bytes(bytes(500_000) + b"another fine-tuned model" * 1000 + bytes(476_000))
    (problem,) = run.problems(RANK)
    assert "the weights at actor_rollout_ref.model.path" in problem.reason
