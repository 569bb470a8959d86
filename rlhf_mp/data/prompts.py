"""Prompts: from rows to token ids."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, islice
from math import isfinite
from pathlib import Path
from typing import Any, Protocol, overload

import numpy as np
import pyarrow as arrow

from rlhf_mp.checkpoint import sha256
from rlhf_mp.config.row_rules import rules_of
from rlhf_mp.config.schema import DataConfig
from rlhf_mp.data import prompt_table
from rlhf_mp.data.prompt_table import DataFile, TableFacts, TableWriter
from rlhf_mp.data.rows import files_of, read_rows
from rlhf_mp.errors import ConfigError, Problem

MAX_PROBLEMS = 10  # bad rows shown; a wrong column name makes every row bad
NOT_IN_PROMPTS = {  # knobs that change neither a prompt nor which prompts there are
    "train_files", "val_files", "train_weights", "train_batch_size", "max_response_length", "shuffle", "seed",
    "curriculum_order", "train_max_samples", "val_max_samples", "cache_dir",
}  # fmt: skip


Row = str | dict[str, Any]


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    chat_template: str | None
    eos_token_id: int | None

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any: ...
    def __call__(self, text: list[str], **options: bool) -> Any: ...
    def decode(self, ids: list[int]) -> str: ...
    def save_pretrained(self, folder: str) -> Any: ...


@dataclass(frozen=True)
class Prompt:
    """A question, ready to be sampled from, and what its reward is judged by."""

    index: int  # its position in the PromptSet
    ids: list[int]
    text: str  # what ``ids`` encode, chat template included
    answer: str
    source: str = ""  # where its row is from: data.reward_fn_key


class PromptSet(Sequence[Prompt]):
    """Prompts of some files, read from a memory-mapped table when they are asked for."""

    def __init__(self, table: arrow.Table, facts: TableFacts):
        self.table, self.facts = table, facts

    def __len__(self) -> int:
        return self.table.num_rows

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        row = {name: self.table[name][index].as_py() for name in ("ids", "rest")}
        return Prompt(index, row["ids"], **json.loads(row["rest"]))

    @property
    def curriculum(self) -> np.ndarray | None:
        """What ``data.curriculum_key`` says of each prompt, as float64; None without it."""
        return None if self.table["key"].null_count else self.table["key"].to_numpy()

    def first(self, count: int) -> "PromptSet":
        """Only the first ``count`` of each entry, a file or a folder; -1: all."""
        if count < 0:
            return self
        starts, sizes = accumulate(self.facts.sizes, initial=0), [min(count, size) for size in self.facts.sizes]
        parts = [self.table.slice(start, size) for start, size in zip(starts, sizes, strict=False)]
        return PromptSet(arrow.concat_tables(parts), replace(self.facts, sizes=sizes))


def load_prompts(files: Sequence[str], tokenizer: Tokenizer, data: DataConfig) -> PromptSet:
    """The prompts of ``files``: those made earlier under ``data.cache_dir``, or read, rendered and tokenized now.

    Raises:
        ConfigError: unreadable files, bad rows, no chat template, too long prompts that may neither be dropped nor
            cut, or nothing left.
    """
    if data.apply_chat_template and tokenizer.chat_template is None:
        reason, fix = "the tokenizer has no chat template", "data.apply_chat_template=false, or an instruct model"
        raise ConfigError([Problem("data.apply_chat_template", True, reason, fix)])
    entries = [files_of(name) for name in files]
    settings = {name: value for name, value in asdict(data).items() if name not in NOT_IN_PROMPTS}
    name = prompt_table.fingerprint([path for paths in entries for path in paths], tokenizer, settings)
    folder = Path(data.cache_dir) / name
    facts = prompt_table.find(folder)
    if facts is None:
        with prompt_table.made_whole(folder) as place:
            facts = make_table(place, files, tokenizer, data)
            prompt_table.seal(place, facts)
    return PromptSet(prompt_table.open_table(folder), facts)


def given_prompts(rows: Sequence[Row], tokenizer: Tokenizer, data: DataConfig) -> list[Prompt]:
    """Prompts that come from no file.

    Args:
        rows: as a file has them, or texts that no answer is known to.

    Raises:
        ConfigError: a row that a file could not have either, or one longer than ``data.max_prompt_length``.
    """
    no_answer = {data.answer_key: ""} | ({data.reward_fn_key: ""} if data.reward_fn_key else {})
    full = [{data.prompt_key: row} | no_answer if isinstance(row, str) else dict(row) for row in rows]
    problems = Problems()
    if not any([problems.add(row_problems(f"prompt {i}", row, data)) for i, row in enumerate(full)]):
        texts = [render(row[data.prompt_key], tokenizer, data) for row in full]
        ids = encode(texts, tokenizer, data)
        problems.add(
            Problem(f"prompt {i}", len(own), "more tokens than data.max_prompt_length", "shorten it, or raise that")
            for i, own in enumerate(ids)
            if len(own) > data.max_prompt_length
        )
    problems.raise_if_any(["the prompts given"])
    return [
        Prompt(i, ids[i], **prompt_fields(row, text, data))
        for i, (row, text) in enumerate(zip(full, texts, strict=True))
    ]


def make_table(place: Path, files: Sequence[str], tokenizer: Tokenizer, data: DataConfig) -> TableFacts:
    """Read everything once, a few thousand rows at a time."""
    writer, lengths, problems, sizes = TableWriter(place / prompt_table.TABLE), Lengths(data), Problems(), []
    for name in files:
        before = writer.num_rows
        stream = read_rows(name)
        while rows := list(islice(stream, prompt_table.ROWS_PER_BATCH)):
            good = [row for where, row in rows if not problems.add(row_problems(where, row, data))]
            texts = [render(row[data.prompt_key], tokenizer, data) for row in good]
            ids = encode(texts, tokenizer, data) if texts else []
            kept = [i for i, tokens in enumerate(ids) if lengths.keep(len(tokens))]
            rest = [prompt_fields(good[i], texts[i], data) for i in kept]
            for i, fields in zip(kept, rest, strict=True):
                if len(ids[i]) > data.max_prompt_length:
                    ids[i] = truncated(ids[i], data)
                    fields["text"] = tokenizer.decode(ids[i])
            keys = [float(good[i][data.curriculum_key]) if data.curriculum_key else None for i in kept]
            writer.write([ids[i] for i in kept], keys, rest)
        sizes.append(writer.num_rows - before)
    writer.close()
    problems.raise_if_any(files)
    lengths.check(files)
    paths = [path for name in files for path in files_of(name)]
    return TableFacts(
        files=[DataFile(str(path), path.stat().st_size, sha256(path)) for path in paths],
        sizes=sizes,
        num_dropped=lengths.num_long if data.filter_overlong_prompts else 0,
        num_truncated=0 if data.filter_overlong_prompts else lengths.num_long,
        num_bytes=(place / prompt_table.TABLE).stat().st_size,
    )


def prompt_fields(row: dict[str, Any], text: str, data: DataConfig) -> dict[str, Any]:
    """Of a Prompt, what is not its position or its ids."""
    source = str(row[data.reward_fn_key]) if data.reward_fn_key else ""
    return {"text": text, "answer": str(row[data.answer_key]), "source": source}


class Problems:
    """The first few, and how many more."""

    def __init__(self):
        self.shown: list[Problem] = []
        self.num_more = 0

    def add(self, found: Iterable[Problem]) -> bool:
        """Whether there are any."""
        found = list(found)
        room = MAX_PROBLEMS - len(self.shown)
        self.shown += found[:room]
        self.num_more += len(found[room:])
        return bool(found)

    def raise_if_any(self, files: Sequence[str]) -> None:
        rest = [Problem("data", str(files), f"{self.num_more} more like these", "see above")] if self.num_more else []
        if self.shown:
            raise ConfigError([*self.shown, *rest])


def row_problems(where: str, row: dict[str, Any], data: DataConfig) -> Iterator[Problem]:
    missing = {knob: column for knob, column in rules_of(data, "rl").columns.items() if column not in row}
    for knob, column in missing.items():
        yield Problem(where, sorted(row), f"has no column {column!r}", f"data.{knob}=<one of these>")
    if missing:
        return
    prompt, answer = row[data.prompt_key], row[data.answer_key]
    if not is_unicode(prompt) or not is_unicode(answer):
        yield Problem(where, "...", "half a character (a lone surrogate) is no text", "write the row again as UTF-8")
        return
    if not isinstance(answer, str | int | float):
        yield Problem(where, answer, f"{data.answer_key!r} must be a text or a number", "data.answer_key=<column>")
    if data.curriculum_key is not None and not is_number(row[data.curriculum_key]):
        reason = f"{data.curriculum_key!r} must be a number: it decides when a prompt comes"
        yield Problem(where, row[data.curriculum_key], reason, "data.curriculum_key=<column>")
    if isinstance(prompt, str):
        return
    if not is_conversation(prompt):
        reason = f"{data.prompt_key!r} must be a text or a list of messages with role and content"
        yield Problem(where, prompt, reason, "data.prompt_key=<column>")
    elif not data.apply_chat_template:
        yield Problem(where, prompt, "chat messages need a chat template", "data.apply_chat_template=true")


def is_conversation(prompt: Any) -> bool:
    def is_message(m: Any) -> bool:
        return isinstance(m, dict) and {"role", "content"} <= m.keys() and isinstance(m["content"], str)

    return isinstance(prompt, list) and bool(prompt) and all(map(is_message, prompt))


def is_unicode(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return False
    return True


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and isfinite(value)


def render(prompt: str | list[dict[str, str]], tokenizer: Tokenizer, data: DataConfig) -> str:
    """The text the policy continues."""
    if not data.apply_chat_template:
        return prompt
    if isinstance(prompt, str):
        system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        prompt = [*system, {"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)


def encode(texts: list[str], tokenizer: Tokenizer, data: DataConfig) -> list[list[int]]:
    """A chat template writes the special tokens itself; to raw text the tokenizer adds what its model expects."""
    special = not data.apply_chat_template
    return tokenizer(texts, add_special_tokens=special, return_attention_mask=False)["input_ids"]


class Lengths:
    """Which prompts are too long, and what becomes of them."""

    def __init__(self, data: DataConfig):
        self.data = data
        self.num_rows = self.num_long = self.longest = 0
        self.shortest: int | None = None

    def keep(self, length: int) -> bool:
        self.num_rows += 1
        self.longest = max(self.longest, length)
        self.shortest = length if self.shortest is None else min(self.shortest, length)
        is_long = length > self.data.max_prompt_length
        self.num_long += is_long
        return not (is_long and self.data.filter_overlong_prompts)

    def check(self, files: Sequence[str]) -> None:
        """Raise when there is nothing, when all would be dropped, or when some may be neither dropped nor cut."""
        limit, key = self.data.max_prompt_length, "data.max_prompt_length"
        if not self.num_rows:
            raise ConfigError([Problem("data", str(files), "no rows in it", "name a file with prompts")])
        may_cut = not self.data.filter_overlong_prompts and self.data.truncation != "error"
        if self.num_long == self.num_rows and not may_cut:
            reason = f"drops all {self.num_rows} prompts; the shortest has {self.shortest} tokens"
            raise ConfigError([Problem(key, limit, reason, f"{key}={self.longest} keeps all")])
        if self.num_long and not self.data.filter_overlong_prompts and not may_cut:
            reason = f"{self.num_long} of {self.num_rows} prompts are longer, up to {self.longest} tokens"
            fix = f"{key}={self.longest}, or data.filter_overlong_prompts=true, or data.truncation=left"
            raise ConfigError([Problem(key, limit, reason, fix)])


def truncated(ids: list[int], data: DataConfig) -> list[int]:
    """``ids`` cut to ``data.max_prompt_length``; the knob names the end, or the middle, that goes."""
    limit = data.max_prompt_length
    match data.truncation:
        case "left":
            return ids[len(ids) - limit :]
        case "right":
            return ids[:limit]
        case "middle":
            return ids[: limit // 2] + ids[len(ids) - (limit - limit // 2) :]
    return ids  # "error": the whole load is about to be refused
