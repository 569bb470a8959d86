"""What a step was made of comes back from disk bit for bit, and is the same step on any number of ranks."""

from dataclasses import fields, replace

import pytest
import torch

from rlhf_mp.data import step_batch
from rlhf_mp.data.step_batch import StepBatch
from rlhf_mp.data.types import MiniBatch, TokenBatch, Totals
from rlhf_mp.errors import CheckpointError


def batch(rows: int, width: int, seed: int) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, width + 1, (rows,), generator=generator)
    lengths[0] = width
    mask = (torch.arange(width) < lengths[:, None]).float()
    advantages = torch.randn(rows, width, generator=generator) * mask
    advantages[0, 1] = torch.nan
    return TokenBatch(
        tokens=torch.randint(2, 90, (rows, width), generator=generator),
        mask=mask,
        rewards=torch.rand(rows, generator=generator),
        group_ids=torch.arange(rows),
        lengths=lengths,
        rollout_logprobs=-torch.rand(rows, width, generator=generator),
        advantages=advantages,
    )


def parts() -> list[StepBatch]:
    """Two ranks, of two updates each; the second rank has a micro-batch less in the first."""
    cuts = [[[[0, 2], [1]], [[3], [2]]], [[[1, 0], []], [[2], [0]]]]
    totals = [Totals(17, 5), Totals(11, 4)]
    return [
        StepBatch(
            12,
            rank,
            2,
            batch(4 - rank, 6 + rank, rank),
            {
                "critic": [MiniBatch(cut[0], totals[0])],
                "actor": [MiniBatch(c, t) for c, t in zip(cut, totals, strict=True)],
            },
            {"critic": [], "actor": [1]},
            40,
            [11] * (4 - rank),
        )  # fmt: skip
        for rank, cut in enumerate(cuts)
    ]


def equal(one: TokenBatch, other: TokenBatch) -> bool:
    """Bit for bit: a NaN equals itself."""
    pairs = [(getattr(one, f.name), getattr(other, f.name)) for f in fields(TokenBatch)]
    if any((a is None) != (b is None) for a, b in pairs):
        return False
    return all(
        a is None or a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs
    )


def test_what_was_written_is_read_back_bit_for_bit(tmp_path):
    for part in reversed(parts()):
        step_batch.write(tmp_path, part)
    for found, part in zip(step_batch.read(tmp_path), parts(), strict=True):
        assert equal(found.batch, part.batch)
        assert replace(found, batch=part.batch) == part
        assert [*found.updates] == ["critic", "actor"]  # in the order they were made
    assert sorted(f.name for f in tmp_path.iterdir()) == ["rank_0.safetensors", "rank_1.safetensors"]


def test_a_step_of_which_every_update_was_skipped_changed_nothing():
    (part, _) = parts()
    assert not part.changed_nothing
    assert replace(part, skipped={"critic": [0], "actor": [0, 1]}).changed_nothing


@pytest.mark.parametrize("harm", ["missing", "cut", "foreign", "none"])
def test_a_part_that_is_missing_or_damaged_is_named(tmp_path, harm):
    for part in parts():
        step_batch.write(tmp_path, part)
    file = tmp_path / "rank_1.safetensors"
    if harm == "cut":
        file.write_bytes(file.read_bytes()[:100])
    elif harm == "foreign":
        from safetensors.torch import save_file

        save_file({"tokens": torch.zeros(1)}, file)
    else:
        file.unlink()
    if harm == "none":
        (tmp_path / "rank_0.safetensors").unlink()
    with pytest.raises(CheckpointError, match="rank_1" if harm in ("cut", "foreign") else "of [2?] ranks"):
        step_batch.read(tmp_path)


def rows_of(part: StepBatch, model: str, update: int) -> list[tuple]:
    """Every row of an update as numbers, whatever micro-batch it is in."""
    found = []
    for rows in part.updates[model][update].micro_batches:
        if rows:
            chosen = part.batch.select(rows)
            found += [
                (*chosen.tokens[i][: int(n)].tolist(), chosen.rewards[i].item()) for i, n in enumerate(chosen.lengths)
            ]
    return found


@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_on_any_number_of_ranks_it_is_the_same_step(dp_size):
    spread = [step_batch.spread(parts(), rank, dp_size) for rank in range(dp_size)]
    for model, made in parts()[0].updates.items():
        for update, minibatch in enumerate(made):
            expected = sorted(row for part in parts() for row in rows_of(part, model, update))
            assert sorted(row for part in spread for row in rows_of(part, model, update)) == expected
            assert {part.updates[model][update].totals for part in spread} == {minibatch.totals}
            assert len({len(part.updates[model][update].micro_batches) for part in spread}) == 1
    for part in spread:  # the empty micro-batches can be made, too
        assert all(len(part.batch.select(rows).tokens) for made in part.updates["actor"] for rows in made.micro_batches)
    if dp_size == 2:
        assert all(equal(a.batch, b.batch) and a.updates == b.updates for a, b in zip(spread, parts(), strict=True))


def test_ranks_of_which_one_alone_had_episodes_of_several_turns_are_joined():
    plain, turns = batch(2, 4, 0), batch(1, 3, 1)
    turns.paid = turns.mask * 0.5
    together = step_batch.joined([plain, turns])
    assert together.paid[:2].eq(0).all() and torch.equal(together.paid[2:, :3], turns.paid)
    assert step_batch.joined([plain, plain]).paid is None


def test_the_steps_of_a_run_are_listed_in_order(tmp_path):
    assert step_batch.kept_steps(tmp_path) == []
    for step in (1_000_000, 9, 70):
        step_batch.folder_of(tmp_path, step).mkdir(parents=True)
    assert step_batch.kept_steps(tmp_path) == [9, 70, 1_000_000]
