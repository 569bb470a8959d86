"""Rows of data files as the model will see them, and how long they are.

  python -m rlhf_mp.data.inspect train.jsonl                                     the rows as they are
  python -m rlhf_mp.data.inspect train.jsonl --model models/Qwen2.5-7B-Instruct  as text with chat template, and ids
  python -m rlhf_mp.data.inspect --config my.yaml                                what a run will use, with its knobs
  python -m rlhf_mp.data.inspect train.parquet --row 17 data.prompt_key=question

Words like data.prompt_key=question change knobs of docs/config.md. Nothing is trained, and no table is kept.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rlhf_mp.config.load import config_from_dict, load_config
from rlhf_mp.config.schema import DataConfig, RunConfig
from rlhf_mp.data.histogram import histogram, quantiles
from rlhf_mp.data.prompts import Problems, Tokenizer, encode, is_conversation, render, row_problems, truncated
from rlhf_mp.data.rows import Row, read_rows
from rlhf_mp.errors import ConfigError, Problem

MAX_SHOWN = 2000  # characters of a text, and ids


def main(argv: Sequence[str]) -> int:
    args = parse_args(argv)
    try:
        config = read_knobs(args.config, args.words)
        files = args.files or [*config.data.train_files, *config.data.val_files]
        if not files:
            raise ConfigError([Problem("FILE", None, "nothing to look at", "name a file, or a --config with files")])
        tokenizer = load(args.model or config.actor_rollout_ref.model.path, config)
        for line in report(files, tokenizer, config.data, args):
            print(line)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # "| head" has seen enough
        return 0
    return 0


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="FILE", help=".jsonl, .parquet, or a dataset folder")
    parser.add_argument("--config", type=Path, help="a run's YAML: its files, model and knobs")
    parser.add_argument("--model", metavar="PATH", help="checkpoint folder whose tokenizer and template are used")
    parser.add_argument("--rows", type=int, default=2, metavar="N", help="rows shown of each file (%(default)s)")
    parser.add_argument("--row", type=int, metavar="N", help="show this row, counted from 1, and no others")
    parser.add_argument(
        "--limit", type=int, default=20_000, metavar="N", help="rows measured of each file; 0: all (%(default)s)"
    )
    args = parser.parse_intermixed_args(argv)
    args.words = [name for name in args.names if "=" in name and not Path(name).exists()]
    args.files = [name for name in args.names if name not in args.words]
    return args


def read_knobs(path: Path | None, words: Sequence[str]) -> RunConfig:
    return config_from_dict({}, words) if path is None else load_config(path, words)


def load(path: str, config: RunConfig) -> Tokenizer | None:
    """The checkpoint's tokenizer; None without a checkpoint."""
    if not path:
        return None
    if not Path(path).is_dir():
        raise ConfigError([Problem("--model", path, "no such folder", "name a Hugging Face checkpoint folder")])
    from rlhf_mp.models.hf import load_tokenizer  # seconds, and only some calls need it

    try:
        return load_tokenizer(path, trust_remote_code=config.actor_rollout_ref.model.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = f"no tokenizer in it: {str(error).splitlines()[0]}"
        raise ConfigError([Problem("--model", path, reason, "name a folder with tokenizer.json")]) from error


def report(
    files: Sequence[str], tokenizer: Tokenizer | None, data: DataConfig, args: argparse.Namespace
) -> Iterator[str]:
    if tokenizer is not None and data.apply_chat_template:
        if tokenizer.chat_template is None:
            reason, fix = "the tokenizer has no chat template", "data.apply_chat_template=false"
            raise ConfigError([Problem("data.apply_chat_template", True, reason, fix)])
        yield from ["# chat template", "", *indented(tokenizer.chat_template), ""]
    for name in files:
        yield from of_file(name, tokenizer, data, args)


def of_file(name: str, tokenizer: Tokenizer | None, data: DataConfig, args: argparse.Namespace) -> Iterator[str]:
    yield f"# {name}"
    yield ""
    lengths: list[int] = []
    answers: list[int] = []
    problems, number = Problems(), 0
    rows = read_rows(name) if args.limit == 0 else islice(read_rows(name), max(args.limit, args.row or 0))
    for number, (where, row) in enumerate(rows, start=1):
        shown = number == args.row if args.row is not None else number <= args.rows
        if number == 1:
            yield from [f"columns   {', '.join(f'{column} ({kind(value)})' for column, value in row.items())}", ""]
        if problems.add(row_problems(where, row, data)):
            continue
        answers.append(len(str(row[data.answer_key])))
        length, lines = of_row((where, row), tokenizer, data, shown)
        lengths.append(length)
        yield from lines
    problems.raise_if_any([name])
    if args.row is not None and number < args.row:
        raise ConfigError([Problem("--row", args.row, f"{name} has {number} rows", f"--row {max(number, 1)}")])
    if number == 0:
        raise ConfigError([Problem(name, 0, "no rows in it", "name a file with prompts")])
    first = "the first " if number == args.limit else ""
    unit = "characters" if tokenizer is None else "tokens"
    yield from measured(f"prompts, {unit}, of {first}{number} rows", lengths)
    if tokenizer is not None:
        yield from too_long(lengths, data)
    yield from measured("answers, characters", answers)


def of_row(row: Row, tokenizer: Tokenizer | None, data: DataConfig, shown: bool) -> tuple[int, list[str]]:
    """The length of a prompt and, if it is shown, what the model sees of it."""
    where, columns = row
    prompt = columns[data.prompt_key]
    if tokenizer is None:
        text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False, indent=1)
        lines = [f"## {where}", "", *indented(text), ""] if shown else []
        size = sum(len(m["content"]) for m in prompt) if is_conversation(prompt) else len(prompt)
        return size, [*lines, *answer_lines(columns, data)] if shown else []
    text = render(prompt, tokenizer, data)
    (ids,) = encode([text], tokenizer, data)
    if not shown:
        return len(ids), []
    seen = truncated(ids, data) if len(ids) > data.max_prompt_length and not data.filter_overlong_prompts else ids
    about = f"{len(ids)} tokens" + (f", {len(seen)} after data.truncation={data.truncation}" if seen != ids else "")
    if len(ids) > data.max_prompt_length and data.filter_overlong_prompts:
        about += f", dropped: more than data.max_prompt_length={data.max_prompt_length}"
    lines = [f"## {where}   {about}", "", *indented(tokenizer.decode(seen) if seen != ids else text), ""]
    ids_shown = " ".join(map(str, seen[:MAX_SHOWN])) + (" ..." if len(seen) > MAX_SHOWN else "")
    return len(ids), [*lines, f"ids       {ids_shown}", *answer_lines(columns, data)]


def answer_lines(columns: dict[str, Any], data: DataConfig) -> list[str]:
    others = {name: value for name, value in columns.items() if name not in (data.prompt_key, data.answer_key)}
    lines = ["answer", *indented(str(columns[data.answer_key]))]
    return [*lines, *(f"{name:9} {one_line(value)}" for name, value in others.items()), ""]


def indented(text: str) -> list[str]:
    """Lines with a bar before them, control characters written out: a row must not move the cursor."""
    cut = text[:MAX_SHOWN] + (f"... ({len(text) - MAX_SHOWN} more characters)" if len(text) > MAX_SHOWN else "")
    return [f"    | {''.join(c if c.isprintable() else repr(c)[1:-1] for c in line)}" for line in cut.split("\n")]


def one_line(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(text) <= 200 else text[:200] + "..."


def kind(value: Any) -> str:
    return {str: "text", list: "list", dict: "mapping", type(None): "null"}.get(type(value), type(value).__name__)


def measured(title: str, lengths: Sequence[int]) -> list[str]:
    return [title, f"    {quantiles(lengths)}", *(f"    {line}" for line in histogram(lengths)), ""]


def too_long(lengths: Sequence[int], data: DataConfig) -> list[str]:
    count = sum(length > data.max_prompt_length for length in lengths)
    fate = ": dropped" if data.filter_overlong_prompts else f": data.truncation={data.truncation}"
    told = f"{count} of {len(lengths)} longer than data.max_prompt_length={data.max_prompt_length}"
    return [told + (fate if count else ""), ""]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
