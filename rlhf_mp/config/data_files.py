"""Do the data files exist, parse and have the columns? Of JSON the beginning is read; of binary formats the schema.

The rest is checked, line by line too, when the rows are tokenised.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import BinaryIO

from rlhf_mp.config.row_rules import RowRules, rules_of
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.errors import Absent, Problem

PARSED_BYTES = 32_000_000  # of each JSON file before anything starts: under a second
MAX_PROBLEMS_PER_FILE = 3  # a file broken on one line is often broken on all


@dataclass
class Contents:
    """What one file holds; rows counts what can be read."""

    rows: int
    problems: list[Problem]


def data_problems(config: RunConfig) -> Iterator[Problem]:
    """Everything wrong with the training and validation files."""
    data, rules = config.data, rules_of(config.data, config.trainer.task)
    if not data.train_files:
        yield Problem("data.train_files", [], "there is nothing to train on", "data.train_files=<train.jsonl>")
    train = [inspect(Path(name), "train_files", rules) for name in data.train_files]
    val = [inspect(Path(name), "val_files", rules) for name in data.val_files]
    for file in [*train, *val]:
        yield from file.problems
    rows = sum(file.rows for file in train)
    if train and not any(file.problems for file in train) and rows < data.train_batch_size:
        yield Problem(
            "data.train_batch_size",
            data.train_batch_size,
            f"data.train_files hold only {rows} rows, less than one step needs",
            f"data.train_batch_size={rows} or less, or more data",
        )


def inspect(path: Path, knob: str, rules: RowRules) -> Contents:
    """One file or dataset folder.

    Args:
        knob: which knob of ``data`` names it.
        rules: what its rows must hold.
    """
    key = f"data.{knob}"
    if not path.exists():
        fix = f"create it, or {key}=<file> (relative paths start where you type the command)"
        return Contents(0, [Absent(key, str(path), "there is no such file", fix)])
    try:
        if path.is_dir():
            found = _folder(path, knob, rules)
        elif path.suffix == ".parquet":
            found = _parquet(path, rules)
        elif path.suffix == ".jsonl":
            found = _jsonl(path, rules)
        else:
            return Contents(0, [_unknown_format(path, key)])
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        reason = f"cannot be read: {str(error).splitlines()[0]}"
        return Contents(
            0, [Problem(key, str(path), reason, "write the file again; it is damaged or not what its name says")]
        )
    if not found.rows and not found.problems:
        found.problems.append(Problem(key, str(path), "the file has no rows", f"{key}=<a file with prompts>"))
    return found


def _unknown_format(path: Path, key: str) -> Problem:
    known = ".jsonl, .parquet, or a folder (saved by datasets, or with such files)"
    return Problem(
        key, str(path), f"unknown format {path.suffix!r}; known: {known}", f"convert it to {path.stem}.jsonl"
    )


def _jsonl(path: Path, rules: RowRules) -> Contents:
    rows, problems = 0, []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if file.tell() > PARSED_BYTES:
                return Contents(rows + 1 + _count_lines(file), problems)
            where = f"{path}:{number}"
            row, problem = _parse(line, where)
            if problem is None:
                rows += 1
                if rows == 1:
                    absent = list(_absent_columns(rules.columns, row.keys(), where))
                    if absent:
                        return Contents(rows, absent)
                problem = rules.problem(row, where)
            if problem is not None:
                problems.append(problem)
                if len(problems) == MAX_PROBLEMS_PER_FILE:
                    break
    return Contents(rows, problems)


def _count_lines(file: BinaryIO) -> int:
    """Of what is left; a blank line counts too."""
    return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))


def _parse(line: bytes, where: str) -> tuple[dict, Problem | None]:
    shown = line[:60].decode(errors="replace").rstrip()
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return {}, Problem(where, shown, f"not JSON: {error.msg} at column {error.colno}", "correct or remove the line")
    except UnicodeDecodeError:
        return {}, Problem(where, shown, "not UTF-8", "save the file as UTF-8")
    if not isinstance(row, dict):
        fix = 'one object a line: {"prompt": ..., ...}'
        return {}, Problem(where, shown, f"a {type(row).__name__}, not an object", fix)
    return row, None


def _parquet(path: Path, rules: RowRules) -> Contents:
    from pyarrow import parquet  # half a second, and only some runs need it

    with parquet.ParquetFile(path) as file:
        return _table(path, file.schema_arrow.names, file.metadata.num_rows, rules)


def _folder(path: Path, knob: str, rules: RowRules) -> Contents:
    """A dataset written by ``save_to_disk``, or the .jsonl and .parquet files right in the folder."""
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        reason = f"holds several datasets: {', '.join(splits)}"
        return Contents(0, [Problem(f"data.{knob}", str(path), reason, f"data.{knob}={path / splits[0]}")])
    if (path / "state.json").is_file():
        return _saved_dataset(path, rules)
    parts = [inspect(part, knob, rules) for part in sorted(path.iterdir()) if part.suffix in (".jsonl", ".parquet")]
    if not parts:
        reason = "neither a saved dataset nor any .jsonl or .parquet file in it"
        return Contents(0, [Problem(f"data.{knob}", str(path), reason, f"data.{knob}=<a folder or file with prompts>")])
    return Contents(sum(part.rows for part in parts), [problem for part in parts for problem in part.problems])


def _saved_dataset(path: Path, rules: RowRules) -> Contents:
    import pyarrow as arrow

    columns: list[str] = []
    rows = 0
    for entry in json.loads((path / "state.json").read_text())["_data_files"]:
        with arrow.memory_map(str(path / entry["filename"])) as file, arrow.ipc.open_stream(file) as table:
            columns = table.schema.names
            rows += sum(batch.num_rows for batch in table)
    return _table(path, columns, rows, rules)


def _table(path: Path, columns: list[str], rows: int, rules: RowRules) -> Contents:
    return Contents(rows, list(_absent_columns(rules.columns, columns, str(path))) if rows else [])


def _absent_columns(wanted: dict[str, str], columns: Iterable[str], where: str) -> Iterator[Problem]:
    columns = sorted(columns)
    for knob, column in wanted.items():
        if column not in columns:
            free = [name for name in columns if name not in wanted.values()]
            likely = free if len(free) == 1 else get_close_matches(column, free, n=1)
            fix = f"data.{knob}={likely[0]}" if likely else f"data.{knob}=<one of {', '.join(columns)}>"
            yield Problem(f"data.{knob}", column, f"{where} has no such column; it has: {', '.join(columns)}", fix)
