"""Checkpoint folders: whole or absent, and provably undamaged. Standard library only.

``global_step_000012/`` holds whatever the engines wrote, ``state.json`` and, written last, ``manifest.json`` with size
and SHA-256 of every file. It is written under another name and renamed, so a half-written one is never found.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_mp.errors import CheckpointError

MANIFEST, STATE = "manifest.json", "state.json"
MARK_SAMPLES, MARK_BYTES = 64, 4096  # of each file of weights
NAME = re.compile(r"global_step_(\d+)")


def folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"global_step_{step:06d}"


def unfinished(folder: Path) -> Path:
    """Where ``folder`` is being written."""
    return folder.with_name(f".writing-{folder.name}")


def start(folder: Path) -> Path:
    """An empty place to write to; leftovers of interrupted attempts go."""
    place = unfinished(folder)
    for leftover in place.parent.glob(unfinished(Path("*")).name):
        shutil.rmtree(leftover)
    place.mkdir(parents=True)
    return place


def finish(folder: Path, state: dict[str, Any]) -> None:
    """Seal what was written to ``unfinished(folder)`` and give it its name."""
    place = unfinished(folder)
    (place / STATE).write_text(json.dumps(state, indent=2))
    files = {str(f.relative_to(place)): _entry(f) for f in sorted(place.rglob("*")) if f.is_file()}
    with (place / MANIFEST).open("w") as out:
        json.dump({"files": files}, out, indent=2)
        out.flush()
        os.fsync(out.fileno())
    replaced = folder.with_name(f".replaced-{folder.name}")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():  # not removed before its successor has the name
        folder.rename(replaced)
    place.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def _entry(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": sha256(file)}


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def newest_first(run_dir: Path) -> list[Path]:
    """All finished checkpoints of a run."""
    found = [p for p in (run_dir / "checkpoints").glob("global_step_*") if NAME.fullmatch(p.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    return int(NAME.fullmatch(folder.name)[1])


def set_aside_later(run_dir: Path, step: int) -> list[Path]:
    """Rename checkpoints of later steps. Returns their new places.

    A run that writes ``step`` now did not continue from them: they must not count as newer, nor be resumed from.
    """
    places = []
    for folder in (f for f in newest_first(run_dir) if step_of(f) > step):
        place = folder.with_name(f"abandoned-{folder.name}")
        shutil.rmtree(place, ignore_errors=True)
        places.append(folder.rename(place))
    return places


def remove_old(run_dir: Path, keep: int, spare: int | None = None) -> None:
    """Keep the newest few, and that of step ``spare``."""
    for folder in newest_first(run_dir)[keep:]:
        if step_of(folder) != spare:
            shutil.rmtree(folder)


def damage(folder: Path, *, checksums: bool) -> Iterator[str]:
    """What is wrong with a checkpoint, file by file; nothing when it is whole.

    Args:
        checksums: read every file, not only its size.
    """
    try:
        entries = json.loads((folder / MANIFEST).read_text())["files"]
        files = {name: (entry["bytes"], entry["sha256"]) for name, entry in entries.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:  # any byte of it may have changed
        yield f"{folder / MANIFEST}: {type(error).__name__}: {error}"
        return
    for name, (num_bytes, digest) in files.items():
        file = folder / name
        if not file.is_file():
            yield f"{file} is missing"
        elif file.stat().st_size != num_bytes:
            yield f"{file} has {file.stat().st_size} bytes, {num_bytes} were written"
        elif checksums and sha256(file) != digest:
            yield f"{file} has changed since it was written"


def read_state(folder: Path, *, checksums: bool) -> dict[str, Any]:
    """``state.json`` of an undamaged checkpoint.

    Raises:
        CheckpointError: damaged.
    """
    if problems := list(damage(folder, checksums=checksums)):
        raise CheckpointError("; ".join(problems))
    return json.loads((folder / STATE).read_text())


def misfits(
    state: dict[str, Any], model: dict[str, Any], num_ranks: int, trained: dict[str, Any] | None = None
) -> Iterator[str]:
    """Why a run of ``model`` on so many ranks cannot continue from a checkpoint; nothing when it can.

    Args:
        trained: by key, what else must be as it was when the checkpoint was written: each trained model's backend.
    """
    trained = trained or {}
    before = state.get("trained", trained)  # of a checkpoint from before this was recorded: nothing is known
    for key in sorted(before.keys() | trained.keys()):
        then, now = (facts.get(key, "nothing") for facts in (before, trained))
        if then != now:
            yield f"was written with {key} = {then}, this run has {now}"
    if state["model"] != model:
        other = {key: value for key, value in state["model"].items() if key not in model or model[key] != value}
        yield f"is of another model, with {other}"
    if state["num_ranks"] != num_ranks and "trained" not in state:  # by backends that may not be able to reshard
        yield f"was written by {state['num_ranks']} rank(s), this run has {num_ranks}"


def model_identity(model_path: Path) -> dict[str, Any]:
    """What must be equal for weights of one checkpoint to fit a model: shapes, not names or versions."""
    config = json.loads((model_path / "config.json").read_text())
    keys = (
        "architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings",
    )  # fmt: skip
    return {key: config[key] for key in keys if key in config}


def weights_mark(folder: Path) -> str:
    """Differs between models of equal shapes: a digest of sizes and of samples all over the files of weights."""
    digest = hashlib.sha256()
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            for place in range(0, size, max(1, size // MARK_SAMPLES)):
                stream.seek(place)
                digest.update(stream.read(MARK_BYTES))
    return digest.hexdigest()[:12]
