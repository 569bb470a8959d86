"""Checkpoint folders: whole or absent, and any damage is told file by file."""

import json
import os
from pathlib import Path

import pytest

from rlhf_mp import checkpoint
from rlhf_mp.errors import CheckpointError

STATE = {"step": 12, "model": {"hidden_size": 64}, "num_ranks": 2}


def write(run_dir: Path, step: int = 12, state=STATE) -> Path:
    """A finished checkpoint with two files of weights."""
    folder = checkpoint.folder_of(run_dir, step)
    place = checkpoint.start(folder)
    (place / "actor").mkdir()
    (place / "actor" / "weights.pt").write_bytes(bytes(range(256)))
    (place / "rng_0.pt").write_bytes(b"random state")
    checkpoint.finish(folder, state)
    return folder


def found(folder: Path, *, checksums: bool = True) -> list[str]:
    return list(checkpoint.damage(folder, checksums=checksums))


def test_a_whole_checkpoint_is_found_and_read(tmp_path):
    folder = write(tmp_path)
    assert checkpoint.newest_first(tmp_path) == [folder] and folder.name == "global_step_000012"
    assert found(folder) == [] and checkpoint.read_state(folder, checksums=True) == STATE
    assert sorted(json.loads((folder / checkpoint.MANIFEST).read_text())["files"]) == [
        "actor/weights.pt", "rng_0.pt", "state.json",
    ]  # fmt: skip


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (9, 1_000_000, 999_999):
        write(tmp_path, step)
    assert [checkpoint.step_of(f) for f in checkpoint.newest_first(tmp_path)] == [1_000_000, 999_999, 9]


@pytest.mark.parametrize("written", [0, 1, 2])
def test_an_interrupted_write_leaves_nothing_that_is_found(tmp_path, written):
    """However far it came before ``finish``."""
    older = write(tmp_path, 3)
    place = checkpoint.start(checkpoint.folder_of(tmp_path, 6))
    for i in range(written):
        (place / f"{i}.pt").write_bytes(b"x")
    assert checkpoint.newest_first(tmp_path) == [older]


def test_a_kill_while_sealing_leaves_nothing_that_is_found(tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path)
    assert checkpoint.newest_first(tmp_path) == []


def test_the_next_attempt_starts_empty(tmp_path):
    place = checkpoint.start(checkpoint.folder_of(tmp_path, 12))
    (place / "leftover.pt").write_bytes(b"x")
    folder = write(tmp_path)
    assert not (folder / "leftover.pt").exists() and found(folder) == []
    assert [f.name for f in folder.parent.iterdir()] == [folder.name]


def test_writing_a_step_again_replaces_it(tmp_path):
    write(tmp_path)
    folder = write(tmp_path, state=STATE | {"num_ranks": 4})
    assert checkpoint.read_state(folder, checksums=True)["num_ranks"] == 4


WEIGHTS = Path("actor") / "weights.pt"


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda f: f.unlink(), "actor/weights.pt is missing"),
        (lambda f: os.truncate(f, 200), "actor/weights.pt has 200 bytes, 256 were written"),
        (lambda f: f.write_bytes(f.read_bytes() + b"x"), "actor/weights.pt has 257 bytes, 256 were written"),
        (lambda f: f.write_bytes(f.read_bytes()[:-1] + b"x"), "actor/weights.pt has changed since it was written"),
    ],
    ids=["missing", "truncated", "longer", "one byte"],
)
def test_every_damage_is_told_with_its_file(tmp_path, harm, words):
    folder = write(tmp_path)
    harm(folder / WEIGHTS)
    (told,) = found(folder)
    assert told.endswith(words)
    with pytest.raises(CheckpointError, match="weights.pt"):
        checkpoint.read_state(folder, checksums=True)


def test_a_look_at_sizes_alone_finds_all_but_changed_bytes(tmp_path):
    folder = write(tmp_path)
    (folder / WEIGHTS).write_bytes(bytes(256))
    assert found(folder, checksums=False) == [] and len(found(folder)) == 1
    os.truncate(folder / WEIGHTS, 0)
    assert len(found(folder, checksums=False)) == 1


def test_several_damages_are_told_at_once(tmp_path):
    folder = write(tmp_path)
    (folder / WEIGHTS).unlink()
    os.truncate(folder / "rng_0.pt", 1)
    assert len(found(folder)) == 2


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"files": 3}', '{"files": {"a": {}}}'])
def test_without_a_readable_manifest_nothing_is_proved(tmp_path, text):
    folder = write(tmp_path)
    if text is None:
        (folder / checkpoint.MANIFEST).unlink()
    else:
        (folder / checkpoint.MANIFEST).write_text(text)
    (told,) = found(folder)
    assert str(folder / checkpoint.MANIFEST) in told


def test_the_state_is_protected_too(tmp_path):
    folder = write(tmp_path)
    (folder / checkpoint.STATE).write_text(json.dumps(STATE | {"step": 13}))
    with pytest.raises(CheckpointError, match="state.json"):
        checkpoint.read_state(folder, checksums=True)


def test_only_the_newest_are_kept(tmp_path):
    for step in (2, 4, 6, 8):
        write(tmp_path, step)
    checkpoint.remove_old(tmp_path, keep=2)
    assert [checkpoint.step_of(f) for f in checkpoint.newest_first(tmp_path)] == [8, 6]


def test_later_steps_of_an_abandoned_attempt_are_set_aside_and_kept(tmp_path):
    for step in (4, 50, 100):
        write(tmp_path, step)
    places = checkpoint.set_aside_later(tmp_path, 4)
    assert [p.name for p in places] == ["abandoned-global_step_000100", "abandoned-global_step_000050"]
    assert [checkpoint.step_of(f) for f in checkpoint.newest_first(tmp_path)] == [4]
    assert all(found(place) == [] for place in places)
    write(tmp_path, 100)  # abandoned once more
    assert checkpoint.set_aside_later(tmp_path, 4) == places[:1] and checkpoint.set_aside_later(tmp_path, 4) == []


def test_whether_a_checkpoint_fits_is_told_with_what_is_different():
    model = {"hidden_size": 64, "vocab_size": 96}
    state = {"model": model, "num_ranks": 2}
    assert list(checkpoint.misfits(state, model, 2)) == []
    assert list(checkpoint.misfits(state, model | {"hidden_size": 32}, 4)) == [
        "is of another model, with {'hidden_size': 64}",
        "was written by 2 rank(s), this run has 4",
    ]


def test_the_backends_that_wrote_it_are_told_too():
    model = {"hidden_size": 64}
    state = {"model": model, "num_ranks": 2, "trained": {"actor.strategy": "torch", "critic.strategy": "torch"}}
    assert list(checkpoint.misfits(state, model, 2, dict(state["trained"]))) == []
    assert list(checkpoint.misfits(state, model, 2, {"actor.strategy": "megatron", "reward": "x"})) == [
        "was written with actor.strategy = torch, this run has megatron",
        "was written with critic.strategy = torch, this run has nothing",
        "was written with reward = nothing, this run has x",
    ]


def test_a_model_is_known_by_its_shapes_not_by_its_name(tmp_path):
    config = {"hidden_size": 64, "vocab_size": 96, "_name_or_path": "a", "transformers_version": "5.12"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert checkpoint.model_identity(tmp_path) == {"hidden_size": 64, "vocab_size": 96}
