"""Rows of the files people keep prompts in, each with the place it came from."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf_mp.errors import ConfigError, Problem

Row = tuple[str, dict[str, Any]]
"""(file and number of the line or row, counted from 1: "train.jsonl:17"; columns)."""


def read_rows(files: str | Sequence[str]) -> Iterator[Row]:
    """Rows of one or several files, in the order given.

    Raises:
        ConfigError: a file that is missing, damaged or of another kind.
    """
    for name in [files] if isinstance(files, str) else files:
        path = Path(name)
        yield from folder_rows(path) if path.is_dir() else file_rows(path)


def files_of(name: str) -> list[Path]:
    """The files that ``name`` stands for: itself, or what is read of a folder.

    Raises:
        ConfigError: there is no such file or folder, or nothing in it.
    """
    path = Path(name)
    if not path.exists():
        raise unreadable(path, "no such file or folder", "correct the path in data.train_files or data.val_files")
    if not path.is_dir():
        return [path]
    if (path / "dataset_dict.json").is_file():
        raise several_datasets(path)
    if (path / "state.json").is_file():
        parts = json.loads((path / "state.json").read_text())["_data_files"]
        return [path / "state.json", *(path / part["filename"] for part in parts)]
    return parts_of(path)


def file_rows(path: Path) -> Iterator[Row]:
    if not path.is_file():
        raise unreadable(path, "no such file or folder", "correct the path in data.train_files or data.val_files")
    if path.suffix == ".jsonl":
        return jsonl_rows(path)
    if path.suffix == ".parquet":
        return parquet_rows(path)
    raise unreadable(path, f"prompts are not read from {path.suffix or 'such'} files", "use .jsonl or .parquet")


def jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except ValueError as error:  # malformed JSON or bytes that are not UTF-8
                raise unreadable(where, f"not JSON: {error}", "one JSON object per line") from error
            if not isinstance(row, dict):
                raise unreadable(where, "not a JSON object", "one JSON object per line")
            yield where, row


def parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise unreadable(path, f"not a Parquet file: {error}", "write it again, or name another file") from error
    number = 0
    with file:
        for batch in file.iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"{path}:{number}", row


def folder_rows(path: Path) -> Iterator[Row]:
    """A dataset written by ``save_to_disk``, or the .jsonl and .parquet files right in the folder, by name."""
    if (path / "dataset_dict.json").is_file():
        raise several_datasets(path)
    if (path / "state.json").is_file():
        import datasets

        for number, row in enumerate(datasets.load_from_disk(str(path)), start=1):
            yield f"{path}:{number}", row
        return
    for file in parts_of(path):
        yield from file_rows(file)


def parts_of(path: Path) -> list[Path]:
    files = sorted(p for p in path.iterdir() if p.suffix in {".jsonl", ".parquet"})
    if not files:
        raise unreadable(path, "neither a saved dataset nor any .jsonl or .parquet file in it", "name another folder")
    return files


def several_datasets(path: Path) -> ConfigError:
    splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
    return unreadable(path, f"holds several datasets: {', '.join(splits)}", f"name one: {path / splits[0]}")


def unreadable(where: Path | str, reason: str, fix: str) -> ConfigError:
    return ConfigError([Problem("data", str(where), reason, fix)])
