"""Checkpoints written while training goes on: of the moment they were asked for, whole or absent, one at a time."""

import threading
from pathlib import Path

import pytest
from test_checkpoints import Actor, Trainer, checkpoints, on_two_ranks, resumed, save, steps

from rlhf_mp import checkpoint
from rlhf_mp.errors import CheckpointError
from rlhf_mp.trainer.best import Best


class Held:
    """A rank's part, which is written when the test says so."""

    def __init__(self, actor: "SlowActor", directory: Path):
        self.actor, self.directory, self.weight = actor, directory, actor.weight
        self.finished = False

    def write(self) -> None:
        assert self.actor.may_write.wait(10)
        if self.actor.error:
            raise self.actor.error
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / f"rank_{self.actor.rank}").write_text(str(self.weight))

    def finish(self) -> None:
        self.finished = True


class SlowActor(Actor):
    def __init__(self, weight: int = 0, rank: int = 0, error: Exception | None = None):
        super().__init__(weight, rank)
        self.may_write, self.error, self.held = threading.Event(), error, []

    def snapshot(self, directory: Path) -> Held:
        self.held.append(Held(self, directory))
        return self.held[-1]


def slow(step: int, weight: int, rank: int = 0, error: Exception | None = None) -> Trainer:
    return Trainer(step, SlowActor(weight, rank, error), SlowActor(-weight, rank))


def let_go(run: Trainer) -> None:
    run.actor.may_write.set()
    run.critic.may_write.set()


def test_a_checkpoint_is_of_the_moment_it_was_asked_for(tmp_path):
    made, run = checkpoints(tmp_path, in_background=True), slow(3, 103)
    made.save(run)
    run.step, run.actor.weight = 5, 105  # training goes on
    made.settle(wait=False)
    assert steps(tmp_path) == []  # nothing is found before it is whole
    let_go(run)
    made.settle(wait=True)
    assert made.said == [f"checkpoint {checkpoint.folder_of(tmp_path, 3)}"] and run.actor.held[0].finished
    fresh, _ = resumed(tmp_path)
    assert (fresh.step, fresh.actor.weight, fresh.critic.weight) == (3, 103, -103)
    assert fresh.loaded["data"] == {"batch": 30}


def test_the_next_one_waits_for_the_one_before(tmp_path):
    made, run = checkpoints(tmp_path, in_background=True), slow(3, 103)
    made.save(run)
    threading.Timer(0.2, let_go, [run]).start()
    run.step = 6
    made.save(run)  # returns once the first has its name
    assert steps(tmp_path) == [3]
    made.settle(wait=True)
    assert steps(tmp_path) == [6, 3]


def test_older_ones_go_only_after_the_new_one_is_whole(tmp_path):
    save(tmp_path, 1, 2)
    made, run = checkpoints(tmp_path, in_background=True), slow(3, 103)
    made.save(run)
    assert steps(tmp_path) == [2, 1]
    let_go(run)
    made.settle(wait=True)
    assert steps(tmp_path) == [3, 2]
    made.settle(wait=True)  # nothing is left to wait for


def test_the_best_one_so_far_stays_until_a_better_one_is_whole(tmp_path):
    made, run = checkpoints(tmp_path, in_background=True, keep=1), slow(0, 100)
    run.best = Best("eval/accuracy", "max")
    let_go(run)
    for run.step, accuracy in {1: 0.9, 2: 0.5, 3: 0.6}.items():
        run.best.offer(run.step, {"eval/accuracy": accuracy})
        made.save(run)
    run.step = 4
    run.best.offer(4, {"eval/accuracy": 0.95})  # its checkpoint is not begun, but the one of step 3 has landed
    made.settle(wait=True)
    assert steps(tmp_path) == [3, 1]
    made.save(run)
    made.settle(wait=True)
    assert steps(tmp_path) == [4]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("shapes differ")])
def test_an_error_comes_out_between_steps_and_leaves_the_older_ones(tmp_path, error):
    save(tmp_path, 1)
    made, run = checkpoints(tmp_path, in_background=True), slow(3, 103, error=error)
    made.save(run)
    made.settle(wait=False)  # not yet
    let_go(run)
    with pytest.raises(CheckpointError, match=f"rank 0 could not write the checkpoint.*{error.args[-1]}"):
        made.settle(wait=True)
    assert steps(tmp_path) == [1]


def test_one_rank_that_fails_ends_the_wait_of_both(tmp_path):
    def work(ranks) -> str:
        made = checkpoints(tmp_path, ranks, in_background=True)
        run = slow(3, 10 + ranks.rank, ranks.rank, OSError(5, "Input/output error") if ranks.rank == 1 else None)
        made.save(run)
        let_go(run)
        try:
            made.settle(wait=True)
        except CheckpointError as failure:
            return str(failure)
        return "written"

    one, other = on_two_ranks(work)
    assert one == other and "rank 1 could not write" in one and steps(tmp_path) == []


def test_nothing_is_sealed_before_every_rank_has_written(tmp_path):
    both = threading.Barrier(2)

    def work(ranks) -> list[int]:
        made, run = checkpoints(tmp_path, ranks, in_background=True), slow(3, 10 + ranks.rank, ranks.rank)
        made.save(run)
        if ranks.rank == 0:
            let_go(run)
        for _ in range(3):
            made.settle(wait=False)
        seen = steps(tmp_path)
        both.wait(10)
        let_go(run)
        made.settle(wait=True)
        return [seen, steps(tmp_path)]

    assert on_two_ranks(work) == [[[], [3]]] * 2
    assert [*checkpoint.damage(checkpoint.folder_of(tmp_path, 3), checksums=True)] == []
