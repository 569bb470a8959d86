"""Saving and resuming on one and on two ranks (threads), with an actor whose weights are one number."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_mp import checkpoint
from rlhf_mp.cluster.ranks import Ranks
from rlhf_mp.errors import CheckpointError
from rlhf_mp.trainer.best import Best
from rlhf_mp.trainer.checkpoints import RunCheckpoints

MODEL = {"hidden_size": 64, "vocab_size": 96}
TRAINED = {"actor_rollout_ref.actor.strategy": "deepspeed", "critic.strategy": "megatron"}


class Actor:
    def __init__(self, weight: int = 0, rank: int = 0):
        self.weight, self.rank = weight, rank

    def save(self, directory: Path) -> None:
        time.sleep(0.1 * self.rank)  # other ranks are slower
        directory.mkdir(exist_ok=True, parents=True)
        (directory / f"rank_{self.rank}").write_text(str(self.weight))

    def load(self, directory: Path) -> None:
        self.weight = int((directory / f"rank_{self.rank}").read_text())


class Trainer:
    """Knows where the data stands after each step."""

    def __init__(self, step: int, actor: Actor, critic: Actor):
        self.step, self.actor, self.critic, self.loaded = step, actor, critic, None
        self.trained, self.best = {"actor": actor, "critic": critic}, None

    def state_dict(self) -> dict[str, Any]:
        return {"data": {"batch": 10 * self.step}, "algorithm": {"kl_ctrl": {"coef": 0.1 / (1 + self.step)}}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = {name: state[name] for name in ("data", "algorithm")}


def trainer(step: int = 0, weight: int = 0, rank: int = 0) -> Trainer:
    return Trainer(step, Actor(weight, rank), Actor(-weight, rank))


def checkpoints(run_dir: Path, ranks: Any = None, **changed: Any) -> RunCheckpoints:
    said = []
    knobs = {"keep": 2, "resume_from": None, "resume": True, "identity": MODEL, "export": None, "say": said.append}
    knobs["trained"] = TRAINED
    made = RunCheckpoints(run_dir, ranks or Ranks(0, 1), **knobs | changed)
    made.said = said
    return made


def save(run_dir: Path, *steps: int, **changed: Any) -> None:
    made = checkpoints(run_dir, **changed)
    for step in steps:
        made.save(trainer(step, weight=100 + step))


def resumed(run_dir: Path, **changed: Any) -> tuple[Trainer, list[str]]:
    made, fresh = checkpoints(run_dir, **changed), trainer()
    made.load_newest(fresh)
    return fresh, made.said


def steps(run_dir: Path) -> list[int]:
    return [checkpoint.step_of(folder) for folder in checkpoint.newest_first(run_dir)]


def test_a_run_continues_where_its_newest_checkpoint_stands(tmp_path):
    save(tmp_path, 3, 6)
    fresh, said = resumed(tmp_path)
    assert (fresh.step, fresh.actor.weight, fresh.critic.weight) == (6, 106, -106)
    assert fresh.loaded == {"data": {"batch": 60}, "algorithm": {"kl_ctrl": {"coef": 0.1 / 7}}}  # to the last digit
    assert said == [f"resumed from {checkpoint.folder_of(tmp_path, 6)} at step 6"]


def test_a_checkpoint_may_lie_anywhere_and_is_never_removed(tmp_path):
    made = checkpoints(tmp_path / "run")
    made.write(trainer(7, weight=107), tmp_path / "mine")
    save(tmp_path / "run", 1, 2, 3, 4)
    fresh = trainer()
    made.read(fresh, tmp_path / "mine")
    assert (fresh.step, fresh.actor.weight, fresh.critic.weight) == (7, 107, -107)
    assert steps(tmp_path / "run") == [4, 3]
    with pytest.raises(CheckpointError, match="of another model"):
        checkpoints(tmp_path / "run", identity=MODEL | {"hidden_size": 32}).read(trainer(), tmp_path / "mine")
    (tmp_path / "mine" / "actor" / "rank_0").write_text("108")
    with pytest.raises(CheckpointError, match="has changed since"):
        made.read(trainer(), tmp_path / "mine")


def test_random_numbers_continue_too(tmp_path):
    torch.manual_seed(1)
    save(tmp_path, 3)
    expected = torch.rand(4)
    torch.manual_seed(2)
    resumed(tmp_path)
    assert torch.equal(torch.rand(4), expected)


def test_without_a_checkpoint_a_run_starts_at_the_beginning(tmp_path):
    fresh, said = resumed(tmp_path)
    assert (fresh.step, fresh.loaded, said) == (0, None, [])


def test_disable_starts_over_and_leaves_what_is_there(tmp_path):
    save(tmp_path, 3)
    fresh, _ = resumed(tmp_path, resume=False)
    assert fresh.step == 0 and steps(tmp_path) == [3]


def test_a_named_checkpoint_is_used_though_there_are_newer_ones(tmp_path):
    save(tmp_path, 3, 6)
    fresh, _ = resumed(tmp_path, resume_from=checkpoint.folder_of(tmp_path, 3))
    assert (fresh.step, fresh.actor.weight) == (3, 103)


def test_older_checkpoints_go_once_the_new_one_is_whole(tmp_path):
    save(tmp_path, 1, 2, 3, 4)
    assert steps(tmp_path) == [4, 3]
    save(tmp_path, 5, keep=1)
    assert steps(tmp_path) == [5]


def test_starting_over_in_the_same_folder_keeps_the_new_line_not_the_old_one(tmp_path):
    """Steps 50 and 100 of the attempt before are higher, but not newer."""
    save(tmp_path, 50, 100)
    made = checkpoints(tmp_path, resume=False)
    for step in (10, 20):
        made.save(trainer(step, weight=step))
    assert steps(tmp_path) == [20, 10]
    assert any("abandoned-global_step_000100" in text for text in made.said)
    fresh, _ = resumed(tmp_path)
    assert (fresh.step, fresh.actor.weight) == (20, 20)


def damage(run_dir: Path, step: int) -> None:
    os.truncate(checkpoint.folder_of(run_dir, step) / "actor" / "rank_0", 1)


def test_a_damaged_checkpoint_is_passed_over_and_that_is_said(tmp_path):
    save(tmp_path, 3, 6)
    damage(tmp_path, 6)
    fresh, said = resumed(tmp_path)
    assert (fresh.step, fresh.actor.weight) == (3, 103)
    assert said[0].startswith("damaged checkpoint global_step_000006 is not used") and "rank_0 has 1 bytes" in said[0]


def test_only_damaged_ones_are_an_error_not_a_start_from_the_beginning(tmp_path):
    save(tmp_path, 3, 6)
    damage(tmp_path, 3)
    damage(tmp_path, 6)
    with pytest.raises(CheckpointError) as error:
        resumed(tmp_path)
    for part in ("global_step_000003", "global_step_000006", "fix: trainer.resume_mode=disable"):
        assert part in str(error.value)


def test_a_damaged_checkpoint_that_was_named_is_an_error_though_there_are_others(tmp_path):
    save(tmp_path, 3, 6)
    damage(tmp_path, 3)
    with pytest.raises(CheckpointError, match="global_step_000003"):
        resumed(tmp_path, resume_from=checkpoint.folder_of(tmp_path, 3))


def test_another_model_is_refused_with_what_is_different(tmp_path):
    save(tmp_path, 3)
    with pytest.raises(CheckpointError, match=r"global_step_000003 is of another model, with \{'hidden_size': 64\}"):
        resumed(tmp_path, identity=MODEL | {"hidden_size": 128})


def test_another_number_of_ranks_is_told_and_draws_random_numbers_of_its_own(tmp_path):
    torch.manual_seed(1)
    save(tmp_path, 3)
    drawn = [torch.rand(4)]
    for rank in range(2):
        torch.manual_seed(1 + rank)
        made, fresh = checkpoints(tmp_path, ranks=Ranks(rank, 2)), trainer()
        made._load(fresh, checkpoint.folder_of(tmp_path, 3), made._choose()[1])
        assert (fresh.step, fresh.actor.weight) == (3, 103)
        assert "written by 1 rank(s), resumed by 2" in made.said
        drawn.append(torch.rand(4))
    assert len({tuple(numbers.tolist()) for numbers in drawn}) == 3


def test_of_a_checkpoint_that_does_not_say_its_backend_the_number_of_ranks_must_be_the_same(tmp_path):
    save(tmp_path, 3)
    folder = checkpoint.folder_of(tmp_path, 3)
    state = checkpoint.read_state(folder, checksums=False)
    del state["trained"]
    assert [*checkpoint.misfits(state, MODEL, 4, TRAINED)] == ["was written by 1 rank(s), this run has 4"]


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (TRAINED | {"critic.strategy": "deepspeed"}, "critic.strategy = megatron, this run has deepspeed"),
        ({"actor_rollout_ref.actor.strategy": "deepspeed"}, "critic.strategy = megatron, this run has nothing"),
    ],
)
def test_other_backends_and_another_set_of_models_are_refused(tmp_path, now, reason):
    save(tmp_path, 3)
    with pytest.raises(CheckpointError, match=f"was written with {reason}\n    fix: "):
        resumed(tmp_path, trained=now)


def test_an_export_lies_in_the_checkpoint_and_is_protected_with_it(tmp_path):
    def export(folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_text("weights")

    save(tmp_path, 3, export=export)
    folder = checkpoint.folder_of(tmp_path, 3)
    (folder / "huggingface" / "model.safetensors").write_text("Weights")
    assert len([*checkpoint.damage(folder, checksums=True)]) == 1


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("inline_container.cc: write")])
def test_a_failed_write_is_told_and_leaves_the_older_ones_as_they_were(tmp_path, monkeypatch, error):
    save(tmp_path, 3)
    made, later = checkpoints(tmp_path), trainer(6)

    def fail(directory):
        directory.mkdir(parents=True)
        (directory / "half").write_text("half")
        raise error

    monkeypatch.setattr(later.actor, "save", fail)
    with pytest.raises(CheckpointError, match="actor/half could not be written.*\n    fix: make room"):
        made.save(later)
    assert steps(tmp_path) == [3] and [f.name for f in (tmp_path / "checkpoints").iterdir()] == ["global_step_000003"]


def test_a_fault_that_has_nothing_to_do_with_writing_stays_itself(tmp_path, monkeypatch):
    later = trainer(6)

    def fail(directory):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(later.actor, "save", fail)
    with pytest.raises(RuntimeError, match="shapes differ"):
        checkpoints(tmp_path).save(later)


class ThreadRanks:
    """Two ranks of one process."""

    num_ranks = 2

    def __init__(self, rank: int, meeting: threading.Barrier, box: list):
        self.rank, self._meeting, self._box = rank, meeting, box
        self._gathered = box[1]

    def barrier(self) -> None:
        self._meeting.wait(10)

    def broadcast(self, value: Any) -> Any:
        if self.rank == 0:
            self._box[0] = value
        self.barrier()
        value = self._box[0]
        self.barrier()
        return value

    def gather(self, value: Any) -> list[Any]:
        self._gathered[self.rank] = value
        self.barrier()
        values = [*self._gathered]
        self.barrier()
        return values


def on_two_ranks(work) -> list:
    meeting, box, results = threading.Barrier(2), [None, [None, None]], [None, None]

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(rank, meeting, box))
        except BaseException as error:
            results[rank] = error
            meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def test_a_checkpoint_holds_what_every_rank_wrote_and_each_gets_its_own_back(tmp_path):
    def write(ranks: ThreadRanks) -> None:
        checkpoints(tmp_path, ranks).save(trainer(3, weight=10 + ranks.rank, rank=ranks.rank))

    def read(ranks: ThreadRanks) -> tuple[int, int, Any]:
        fresh = trainer(rank=ranks.rank)
        checkpoints(tmp_path, ranks).load_newest(fresh)
        return fresh.step, fresh.actor.weight, fresh.loaded["data"]

    assert on_two_ranks(write) == [None, None]
    folder = checkpoint.folder_of(tmp_path, 3)
    assert {str(f.relative_to(folder)) for f in folder.rglob("*_?*") if f.is_file()} == {
        "actor/rank_0", "actor/rank_1", "critic/rank_0", "critic/rank_1", "rng_0.pt", "rng_1.pt",
    }  # fmt: skip
    assert [*checkpoint.damage(folder, checksums=True)] == []  # nothing was sealed before all had written
    assert on_two_ranks(read) == [(3, 10, {"batch": 30}), (3, 11, {"batch": 30})]


def test_all_ranks_continue_from_the_one_that_rank_0_chose(tmp_path):
    on_two_ranks(lambda ranks: [checkpoints(tmp_path, ranks).save(trainer(s, s, ranks.rank)) for s in (3, 6)])
    os.truncate(checkpoint.folder_of(tmp_path, 6) / "actor" / "rank_1", 0)

    def read(ranks: ThreadRanks) -> int:
        fresh = trainer(rank=ranks.rank)
        checkpoints(tmp_path, ranks).load_newest(fresh)
        return fresh.step

    assert on_two_ranks(read) == [3, 3]


def test_the_best_checkpoint_outlives_newer_ones_until_there_is_a_better(tmp_path):
    made, run = checkpoints(tmp_path, keep=2), trainer()
    run.best = Best("eval/accuracy", "max")
    accuracies = {1: 0.2, 2: 0.9, 3: 0.5, 4: 0.6, 5: 0.9, 6: 0.95, 7: 0.1}
    kept = []
    for run.step, accuracy in accuracies.items():
        run.best.offer(run.step, {"eval/accuracy": accuracy})
        made.save(run)
        kept.append(sorted(steps(tmp_path)))
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [5, 6], [6, 7]]


def test_a_resumed_run_knows_the_best_of_the_steps_before(tmp_path):
    made, run = checkpoints(tmp_path), trainer(4)
    run.best = Best("eval/accuracy", "max", 0.9, 2)
    made.save(run)
    same, other = trainer(), trainer()
    same.best, other.best = Best("eval/accuracy", "max"), Best("eval/reward_mean", "max")
    for fresh in (same, other):
        checkpoints(tmp_path).load_newest(fresh)
    assert (same.best.value, same.best.step) == (0.9, 2)
    assert (other.best.value, other.best.step) == (None, None)  # it was another metric's
