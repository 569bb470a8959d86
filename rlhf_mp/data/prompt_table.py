"""Tokenised prompts on disk, memory-mapped: what a process holds is what it looks at, however many there are.

A table is made once from the data files and found again by what it was made from: files, tokenizer, settings.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as arrow

from rlhf_mp.checkpoint import sha256
from rlhf_mp.errors import CheckpointError

TABLE, FACTS = "prompts.arrow", "facts.json"
ENCODE = json.JSONEncoder(ensure_ascii=False).encode
ROWS_PER_BATCH = 2048  # few enough to tokenise at once, enough that a million prompts have few parts
LAYOUT = 1  # of the files; another number makes tables afresh
SCHEMA = arrow.schema([("ids", arrow.list_(arrow.int32())), ("key", arrow.float64()), ("rest", arrow.string())])


@dataclass(frozen=True)
class DataFile:
    """A data file as it was when it was read."""

    path: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class TableFacts:
    """What was found while a table was made."""

    files: list[DataFile]
    sizes: list[int]  # prompts of each entry that was named, a file or a folder
    num_dropped: int  # longer than data.max_prompt_length
    num_truncated: int
    num_bytes: int  # of the table
    layout: int = LAYOUT

    @classmethod
    def read(cls, path: Path) -> "TableFacts":
        found = json.loads(path.read_text())
        files = [DataFile(**file) for file in found.pop("files")]
        return cls(files=files, **found)


def fingerprint(paths: Iterable[Path], tokenizer: Any, settings: dict[str, Any]) -> str:
    """What a table is made from, as the name of its folder. Files count by size and time: reading them takes longer.

    The tokenizer counts as what it saves, chat template included.
    """
    stats = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        saved = [(file.name, sha256(file)) for file in sorted(Path(folder).rglob("*")) if file.is_file()]
    made_from = json.dumps([LAYOUT, stats, saved, settings], sort_keys=True)
    return hashlib.sha256(made_from.encode()).hexdigest()[:24]


def find(folder: Path) -> TableFacts | None:
    """The facts of a whole table; None where there is none, or a damaged one."""
    try:
        facts = TableFacts.read(folder / FACTS)
        whole = facts.layout == LAYOUT and (folder / TABLE).stat().st_size == facts.num_bytes
    except (OSError, ValueError, TypeError, LookupError):
        return None
    return facts if whole else None


class TableWriter:
    """Appends prompts; nothing of them stays in memory."""

    def __init__(self, path: Path):
        self.path, self.num_rows = path, 0
        self._writer = arrow.ipc.new_file(str(path), SCHEMA)

    def write(self, ids: list[list[int]], keys: list[float | None], rest: list[dict[str, Any]]) -> None:
        texts = [ENCODE(fields) for fields in rest]
        self._writer.write_batch(arrow.record_batch([ids, keys, texts], schema=SCHEMA))
        self.num_rows += len(ids)

    def close(self) -> None:
        self._writer.close()


@contextmanager
def made_whole(folder: Path) -> Iterator[Path]:
    """A place to write a table to; it becomes ``folder`` when the body ends well, and goes otherwise.

    Another run may make the same table at the same time: the first to end wins, both are equal.
    """
    place = folder.with_name(f".writing-{uuid4().hex}")
    place.mkdir(parents=True)  # not a private folder of tempfile's: others may share the tables
    try:
        yield place
        if find(folder) is None:
            shutil.rmtree(folder, ignore_errors=True)  # damaged
            try:
                place.rename(folder)
            except OSError:
                if find(folder) is None:
                    raise
    finally:
        shutil.rmtree(place, ignore_errors=True)


def seal(place: Path, facts: TableFacts) -> None:
    """Written last: a table without it is no table."""
    with (place / FACTS).open("w") as out:
        json.dump(asdict(facts), out, indent=1)
        out.flush()
        os.fsync(out.fileno())


def open_table(folder: Path) -> arrow.Table:
    """The columns, memory-mapped."""
    return arrow.ipc.open_file(arrow.memory_map(str(folder / TABLE))).read_all()


def compare_files(then: Mapping[str, Sequence[DataFile]], now: Mapping[str, Sequence[DataFile]]) -> list[str]:
    """What the user should know of files that changed between a checkpoint and the run that continues from it.

    Raises:
        CheckpointError: training files have changed: positions in the old ones mean nothing in the new ones.
    """
    changed = {knob: [*changed_files(then[knob], files)] for knob, files in now.items()}
    if in_training := changed["data.train_files"]:
        raise CheckpointError(
            f"data.train_files are not those of the checkpoint: {'; '.join(in_training)}\n"
            "    fix: put the old files back, or start anew with trainer.experiment_name=<new name>"
        )
    return [f"validation before and after is not comparable: {change}" for change in changed["data.val_files"]]


def changed_files(then: Sequence[DataFile], now: Sequence[DataFile]) -> Iterator[str]:
    """What of the data is no longer what it was, file by file. A file that was moved is the same."""
    for before, after in zip_longest(then, now):
        if before is None:
            yield f"{after.path} was not there"
        elif after is None:
            yield f"{before.path} is not named any more"
        elif before.sha256 != after.sha256:
            yield f"{after.path} has changed: {before.num_bytes} bytes then, {after.num_bytes} now, other contents"
