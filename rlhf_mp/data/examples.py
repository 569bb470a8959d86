"""What supervised tasks learn from: examples of one sequence, or of two that answer the same prompt, the better first.

An example becomes the trajectories of a group, so that collating, cutting and counting are those of sampled ones:
the mask selects the tokens to be learned, and a chosen response's reward is its margin over the rejected one.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rlhf_mp.config.row_rules import rules_of
from rlhf_mp.config.schema import DataConfig
from rlhf_mp.data.conversations import Piece, Unsuitable, chat_pieces, pieces_of
from rlhf_mp.data.prompts import MAX_PROBLEMS, Tokenizer
from rlhf_mp.data.rows import Row, read_rows
from rlhf_mp.data.types import Trajectory
from rlhf_mp.errors import ConfigError, Problem

ROWS_AT_ONCE = 1000  # tokenized in one call, which uses all cores


@dataclass(frozen=True, slots=True)
class Learned:
    """Token ids, and 1 for each that is learned. Arrays: Python's integers would take seven times as much memory."""

    ids: array
    mask: bytes


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence, or the chosen and the rejected response to one prompt."""

    sequences: tuple[Learned, ...]
    margin: float = 0.0

    @property
    def longest(self) -> int:
        return max(len(sequence.ids) for sequence in self.sequences)

    def trajectories(self, group_id: int) -> list[Trajectory]:
        """The chosen one first; its reward is the margin."""
        rewards = (self.margin, 0.0)
        return [
            Trajectory([], [*s.ids], [0.0] * len(s.ids), [bool(m) for m in s.mask], reward, group_id, 0, "stop")
            for s, reward in zip(self.sequences, rewards, strict=False)
        ]


@dataclass(frozen=True)
class ExampleSet:
    examples: list[Example]
    sizes: list[int]  # examples of each file or folder that was named; they follow each other
    num_dropped: int = 0  # longer than data.max_length


class ExampleReader:
    """Rows to examples of one task.

    Args:
        stop_ids: tokens that end a response.
    """

    def __init__(self, task: str, tokenizer: Tokenizer, stop_ids: Sequence[int], data: DataConfig):
        self.task, self.tokenizer, self.stop_ids, self.data = task, tokenizer, stop_ids, data
        self.rules = rules_of(data, task)

    def read(self, files: Sequence[str], at_most: int = -1) -> ExampleSet:
        """All examples of the files, or of the first rows of each.

        Raises:
            ConfigError: unreadable files, bad rows, no chat template, too long examples that may not be dropped, or
                nothing left.
        """
        self._check_template()
        examples: list[Example] = []
        sizes, problems, longest, num_long = [], [], 0, 0
        for name in files:
            rows, before = islice(read_rows(name), at_most if at_most >= 0 else None), len(examples)
            while len(problems) < MAX_PROBLEMS and (some := [*islice(rows, ROWS_AT_ONCE)]):
                good, found = self._split(some)
                problems += found
                for example in self._encoded(good):
                    longest, is_long = max(longest, example.longest), example.longest > self.data.max_length
                    num_long += is_long
                    examples += [] if is_long else [example]
            sizes.append(len(examples) - before)
        if problems:
            raise ConfigError(problems[:MAX_PROBLEMS])
        self._check_lengths(len(examples), num_long, longest, files)
        return ExampleSet(examples, sizes, num_dropped=num_long)

    def _check_template(self) -> None:
        if self.data.apply_chat_template and self.tokenizer.chat_template is None:
            reason, fix = "the tokenizer has no chat template", "data.apply_chat_template=false, or an instruct model"
            raise ConfigError([Problem("data.apply_chat_template", True, reason, fix)])

    def _split(self, rows: Sequence[Row]) -> tuple[list[tuple[list[list[Piece]], float]], list[Problem]]:
        """Each row's sequences in pieces with its margin, and the rows that have none."""
        kept, problems = [], []
        for where, row in rows:
            if problem := self.rules.problem(row, where):
                problems.append(problem)
                continue
            try:
                kept.append((self._pieces(row), self._margin(row)))
            except Unsuitable as error:
                fix = "one row for each answer, or data.apply_chat_template with another template"
                problems.append(Problem(where, f"{len(row)} columns", str(error), fix))
        return kept, problems

    def _pieces(self, row: dict[str, Any]) -> list[list[Piece]]:
        data = self.data
        if self.task != "sft":
            return [pieces_of(row, key, data, self.tokenizer) for key in (data.chosen_key, data.rejected_key)]
        if data.messages_key is not None:
            return [chat_pieces(row[data.messages_key], self.tokenizer)]
        return [pieces_of(row, data.response_key, data, self.tokenizer)]

    def _margin(self, row: dict[str, Any]) -> float:
        return 0.0 if "margin_key" not in self.rules.columns else float(row[self.data.margin_key])

    def _encoded(self, rows: Sequence[tuple[list[list[Piece]], float]]) -> Iterator[Example]:
        pieces = [piece for sequences, _ in rows for sequence in sequences for piece in sequence]
        ids = iter(self._tokenized(pieces))
        for sequences, margin in rows:
            yield Example(tuple(self._joined(sequence, ids) for sequence in sequences), margin)

    def _tokenized(self, pieces: Sequence[Piece]) -> list[list[int]]:
        found: list[list[int]] = [[]] * len(pieces)
        for special in (False, True):
            places = [i for i, piece in enumerate(pieces) if piece.special == special]
            if places:
                texts = [pieces[i].text for i in places]
                for i, ids in zip(places, self.tokenizer(texts, add_special_tokens=special)["input_ids"], strict=True):
                    found[i] = ids
        return found

    def _joined(self, pieces: Sequence[Piece], ids: Iterator[list[int]]) -> Learned:
        """One sequence; ``ids`` yields the tokens of each piece.

        Of a response everything up to its last stop token is learned: what a template writes after it (a newline,
        mostly) the policy never gets to. Where the template writes no stop token at the very end, one is added, or
        the policy would learn answers but not to stop.
        """
        tokens, mask = array("i"), bytearray()
        for piece in pieces:
            own = next(ids)
            stops = [i for i, token in enumerate(own) if token in self.stop_ids]
            learned = (stops[-1] + 1 if stops else len(own)) if piece.is_learned else 0
            tokens.extend(own)
            mask += b"\1" * learned + b"\0" * (len(own) - learned)
        if not stops and self.tokenizer.eos_token_id is not None:
            tokens.append(self.tokenizer.eos_token_id)
            mask += b"\1"
        mask[0] = 0  # nothing stands before it that it could be predicted from
        return Learned(tokens, bytes(mask))

    def _check_lengths(self, num_kept: int, num_long: int, longest: int, files: Sequence[str]) -> None:
        key, limit, total = "data.max_length", self.data.max_length, num_kept + num_long
        if not total:
            raise ConfigError([Problem("data", list(files), "no rows in it", "name files with examples")])
        if not num_kept:
            raise ConfigError([Problem(key, limit, f"drops all {total} examples", f"{key}={longest} keeps all")])
        if num_long and not self.data.filter_overlong_prompts:
            reason = f"{num_long} of {total} examples are longer, up to {longest} tokens"
            raise ConfigError([Problem(key, limit, reason, f"{key}={longest}, or data.filter_overlong_prompts=true")])
