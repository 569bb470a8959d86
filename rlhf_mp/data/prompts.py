"""Prompts: from rows to token ids, and the order they are visited in."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlhf_mp.config.schema import DataConfig
from rlhf_mp.data.rows import read_rows
from rlhf_mp.errors import CheckpointError, ConfigError, Problem

MAX_PROBLEMS = 10  # bad rows shown; a wrong column name makes every row bad


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    chat_template: str | None

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any: ...
    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Any: ...


@dataclass(frozen=True)
class Prompt:
    """A question, ready to be sampled from, and what its reward is judged by."""

    index: int  # its position in the PromptSet
    ids: list[int]
    text: str  # what ``ids`` encode, chat template included
    answer: str
    source: str = ""  # where its row is from: data.reward_fn_key


@dataclass(frozen=True)
class PromptSet:
    prompts: list[Prompt]
    num_dropped: int  # longer than data.max_prompt_length


def load_prompts(files: str | Sequence[str], tokenizer: Tokenizer, data: DataConfig) -> PromptSet:
    """Read, render and tokenize all prompts.

    Raises:
        ConfigError: unreadable files, bad rows, no chat template, too long prompts that may not be dropped,
            or nothing left.
    """
    if data.apply_chat_template and tokenizer.chat_template is None:
        reason, fix = "the tokenizer has no chat template", "data.apply_chat_template=false, or an instruct model"
        raise ConfigError([Problem("data.apply_chat_template", True, reason, fix)])
    texts, answers, sources, problems = [], [], [], []
    for where, row in read_rows(files):
        if found := [*row_problems(where, row, data)]:
            problems += found
        else:
            texts.append(render(row[data.prompt_key], tokenizer, data))
            answers.append(str(row[data.answer_key]))
            sources.append(str(row[data.reward_fn_key]) if data.reward_fn_key else "")
    if len(problems) > MAX_PROBLEMS:
        rest = Problem("data", str(files), f"{len(problems) - MAX_PROBLEMS} more like these", "see above")
        problems = [*problems[:MAX_PROBLEMS], rest]
    if problems:
        raise ConfigError(problems)
    if not texts:
        raise ConfigError([Problem("data", str(files), "no rows in it", "name a file with prompts")])
    # A chat template writes the special tokens itself; for raw text the tokenizer adds what its model expects.
    ids = tokenizer(texts, add_special_tokens=not data.apply_chat_template)["input_ids"]
    check_lengths([len(tokens) for tokens in ids], data)
    kept = [i for i, tokens in enumerate(ids) if len(tokens) <= data.max_prompt_length]
    prompts = [Prompt(index, ids[i], texts[i], answers[i], sources[i]) for index, i in enumerate(kept)]
    return PromptSet(prompts, num_dropped=len(ids) - len(prompts))


def row_problems(where: str, row: dict[str, Any], data: DataConfig) -> Iterator[Problem]:
    columns = {"data.prompt_key": data.prompt_key, "data.answer_key": data.answer_key}
    if data.reward_fn_key:
        columns["data.reward_fn_key"] = data.reward_fn_key
    missing = {knob: column for knob, column in columns.items() if column not in row}
    for knob, column in missing.items():
        yield Problem(where, sorted(row), f"has no column {column!r}", f"{knob}=<one of these>")
    if missing:
        return
    prompt, answer = row[data.prompt_key], row[data.answer_key]
    if not isinstance(answer, str | int | float):
        yield Problem(where, answer, f"{data.answer_key!r} must be a text or a number", "data.answer_key=<column>")
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


def render(prompt: str | list[dict[str, str]], tokenizer: Tokenizer, data: DataConfig) -> str:
    """The text the policy continues."""
    if not data.apply_chat_template:
        return prompt
    if isinstance(prompt, str):
        system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        prompt = [*system, {"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)


def check_lengths(lengths: Sequence[int], data: DataConfig) -> None:
    """Raise when too long prompts may not be dropped, or when dropping them leaves nothing."""
    limit = data.max_prompt_length
    num_long = sum(length > limit for length in lengths)
    if num_long == len(lengths):
        reason = f"drops all {len(lengths)} prompts; the shortest has {min(lengths)} tokens"
        raise ConfigError(
            [Problem("data.max_prompt_length", limit, reason, f"data.max_prompt_length={max(lengths)} keeps all")]
        )
    if num_long and not data.filter_overlong_prompts:
        reason = f"{num_long} of {len(lengths)} prompts are longer, up to {max(lengths)} tokens"
        fix = f"data.max_prompt_length={max(lengths)}, or data.filter_overlong_prompts=true"
        raise ConfigError([Problem("data.max_prompt_length", limit, reason, fix)])


class PromptOrder:
    """Which prompts each step uses: a function of the seed and the position, so a resumed run sees the same ones.

    The last, incomplete batch of an epoch is dropped; with shuffling other prompts fall into it every epoch.
    """

    def __init__(self, num_prompts: int, batch_size: int, seed: int, shuffle: bool):
        if num_prompts < batch_size:
            reason = f"there are only {num_prompts} prompts, so no batch is ever complete"
            fix = f"data.train_batch_size={num_prompts} or less"
            raise ConfigError([Problem("data.train_batch_size", batch_size, reason, fix)])
        self.num_prompts, self.batch_size, self.seed, self.shuffle = num_prompts, batch_size, seed, shuffle
        self._identity = {"num_prompts": num_prompts, "batch_size": batch_size, "seed": seed, "shuffle": shuffle}
        self.epoch = self.batch = 0  # of the next batch

    @property
    def batches_per_epoch(self) -> int:
        return self.num_prompts // self.batch_size

    def next(self) -> tuple[int, list[int]]:
        """The epoch, counted from 0, and the indices of the next batch's prompts."""
        epoch, start = self.epoch, self.batch * self.batch_size
        indices = self._order(epoch)[start : start + self.batch_size]
        epochs, self.batch = divmod(self.batch + 1, self.batches_per_epoch)
        self.epoch += epochs
        return epoch, indices

    def state_dict(self) -> dict[str, int | bool]:
        return {**self._identity, "epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state: dict[str, int | bool]) -> None:
        """Continue where ``state_dict`` was taken.

        Raises:
            CheckpointError: it was taken with other prompts, batch size, seed or shuffling.
        """
        saved = {name: state[name] for name in self._identity}
        if saved != self._identity:
            raise CheckpointError(f"the order of prompts was {saved} in the checkpoint, now it is {self._identity}")
        self.epoch, self.batch = state["epoch"], state["batch"]

    def _order(self, epoch: int) -> list[int]:
        order = list(range(self.num_prompts))
        if self.shuffle:
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order
