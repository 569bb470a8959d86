"""Updates that had to be skipped: counted, kept, and too many in a row end the run."""

from pathlib import Path

import pytest
import torch
from loop_parts import SHARE, TRAJECTORIES, Actor, trainer

from rlhf_mp import checkpoint
from rlhf_mp.data import step_batch
from rlhf_mp.data.collate import collate
from rlhf_mp.data.types import MiniBatch, Totals
from rlhf_mp.errors import DivergedError
from rlhf_mp.train.base import ParallelLayout
from rlhf_mp.trainer.updates import NUM_BAD_KEPT, KeptBatches, Updates

NAN, INF = float("nan"), float("inf")
ALONE = ParallelLayout(0, 1, is_output_rank=True)
UPDATES = [MiniBatch([[1, 0]], Totals(12, 4)), MiniBatch([[2], [3]], Totals(6, 4))]


class Diverging(Actor):
    """Its gradients have the given norms, one after the other, and are then fine."""

    def __init__(self, events: list, *norms: float):
        super().__init__(events)
        self.norms = [*norms]

    def train_step(self, micro_batches, totals, loss_fn):
        norm = self.norms.pop(0) if self.norms else 0.5
        self.weight += norm == norm and norm != INF
        return {"grad_norm": (norm, 1), "loss": (norm, 1)}


def keeper(run_dir: Path, which: str = "bad") -> KeptBatches:
    return KeptBatches(run_dir, lambda: None, ALONE, which, "seed: 1\n")


def run(num_steps: int, norms: list[float], **knobs):
    events, said = [], []
    actor = Diverging(events, *norms)
    made = trainer(num_steps, events, actor=actor, updates=Updates(say=said.append, **knobs))
    made.events, made.said = events, said
    return made


def test_a_skipped_update_is_counted_told_and_its_batch_kept(tmp_path):
    made = run(3, [1.0, 1.0, 1.0, NAN], keeper=keeper(tmp_path))
    made.train()
    metrics = {step: found for step, found in made.log.sinks[0].written if "actor/skipped_updates" in found}
    assert {step: found["actor/skipped_updates"] for step, found in metrics.items()} == {1: 0, 2: 1, 3: 0}
    place = tmp_path / "batches" / "step_000002"
    told = "1 of 2 updates of the actor skipped: their loss or gradient is no finite number"
    assert made.said == [f"step 2: {told}; the batch is in {place}"]
    (part,) = step_batch.read(place)
    assert (part.step, part.num_steps, part.skipped) == (2, 3, {"actor": [1]})
    assert part.updates == {"actor": SHARE.minibatches}
    assert part.batch.tokens.equal(collate(TRAJECTORIES).tokens) and part.batch.advantages is not None
    assert part.versions == [t.version for t in TRAJECTORIES]
    assert (place / "config.yaml").read_text() == "seed: 1\n"
    assert step_batch.kept_steps(tmp_path) == [2]


@pytest.mark.parametrize("norm", [NAN, INF])
def test_so_many_in_a_row_end_the_run_with_a_checkpoint_of_what_was_before(tmp_path, norm):
    made = run(9, [1.0, norm, norm, norm], limit=3, keeper=keeper(tmp_path))
    with pytest.raises(DivergedError) as error:
        made.train()
    assert made.events[-1] == ("save", 2) and made.actor.weight == 1
    for words in ("3 updates of the actor in a row", "step 2", f"launch/replay.py {tmp_path} --step 2", "=6 goes on"):
        assert words in str(error.value)
    assert 2 in dict(made.log.sinks[0].written)  # its metrics are written, too


def test_one_that_succeeds_between_them_starts_the_count_again():
    made = run(4, [NAN, NAN, 1.0, NAN, NAN, 1.0, NAN, NAN], limit=3)
    made.train()
    assert made.step == 4 and made.actor.weight == 2


def test_weights_of_a_step_without_any_update_need_not_differ():
    made = run(3, [NAN, NAN, 1.0, NAN, 1.0, 1.0], limit=3)
    made.train()
    assert made.swap.must_differ == [False, False, True, True]


def test_without_a_batch_the_error_says_how_to_keep_it():
    with pytest.raises(DivergedError, match="trainer.save_batches=bad"):
        run(2, [NAN] * 4, limit=1).train()


def keep(kept: KeptBatches, step: int, skipped: list[int]) -> Path | None:
    updates = Updates(keeper=kept, say=lambda text: None)
    updates.made("actor", UPDATES, [NAN if i in skipped else 1.0 for i in range(2)])
    updates.settle(step, 20, collate(TRAJECTORIES))
    return step_batch.folder_of(kept.run_dir, step) if step in step_batch.kept_steps(kept.run_dir) else None


def save(run_dir: Path, step: int) -> None:
    folder = checkpoint.folder_of(run_dir, step)
    checkpoint.start(folder)
    checkpoint.finish(folder, {})


def test_all_batches_are_kept_from_the_oldest_checkpoint_on(tmp_path):
    kept = keeper(tmp_path, "all")
    for step in range(1, 10):
        keep(kept, step, [1] if step == 2 else [])
        if step % 3 == 0:
            save(tmp_path, step)
            checkpoint.remove_old(tmp_path, 2)
    # the checkpoints are of steps 6 and 9, but step 9's came after its batch was kept: 3 was the oldest then
    assert step_batch.kept_steps(tmp_path) == [2, 4, 5, 6, 7, 8, 9]


def test_nothing_is_kept_when_that_is_off(tmp_path):
    assert keep(keeper(tmp_path, "off"), 1, [0, 1]) is None and not (tmp_path / "batches").exists()


def test_a_run_that_goes_wrong_often_does_not_fill_its_disk(tmp_path):
    for step in range(1, 4):
        keep(keeper(tmp_path), step, [0])  # a run that is resumed each time
    kept = keeper(tmp_path)
    for step in range(4, 20):
        keep(kept, step, [0])
    assert step_batch.kept_steps(tmp_path) == [*range(20 - NUM_BAD_KEPT, 20)]


def test_what_an_attempt_before_left_is_replaced(tmp_path):
    folder = keep(keeper(tmp_path), 5, [0])
    (folder / "rank_1.safetensors").write_bytes(b"of two ranks")
    keep(keeper(tmp_path), 5, [1])
    (part,) = step_batch.read(folder)
    assert part.skipped == {"actor": [1]}
    assert torch.equal(part.batch.rewards, torch.tensor([t.reward for t in TRAJECTORIES]))
