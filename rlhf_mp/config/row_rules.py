"""What a row of the data files must hold, task by task. One pass over the files before the start, one while reading."""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any

from rlhf_mp.config.schema import DataConfig
from rlhf_mp.errors import Problem

Row = dict[str, Any]
CORRECT = "correct or remove the line"


@dataclass(frozen=True)
class RowRules:
    """Columns by the knob of ``data`` that names them, and what is wrong with one row (None: nothing)."""

    columns: dict[str, str]
    problem: Callable[[Row, str], Problem | None]


def rules_of(data: DataConfig, task: str) -> RowRules:
    """The rules of ``trainer.task``."""
    names = COLUMNS[task]
    if task == "sft" and data.messages_key is not None:
        names = ("messages_key",)
    if task == "reward_model" and data.margin_key is not None:
        names = (*names, "margin_key")
    if task == "rl" and data.curriculum_key is not None:
        names = (*names, "curriculum_key")
    if task == "rl" and data.reward_fn_key:
        names = (*names, "reward_fn_key")
    columns = {name: getattr(data, name) for name in names}

    def problem(row: Row, where: str) -> Problem | None:
        for column in columns.values():
            if column not in row:
                return Problem(where, sorted(row), f"this line has no {column!r}, others have", "add it, or remove it")
        found = (CELLS[name](row[column], repr(column), data) for name, column in columns.items())
        for (reason, fix), column in zip(found, columns.values(), strict=True):
            if reason:
                return Problem(where, row[column], reason, fix)
        return _equal_pair(row, where, data) if task in ("dpo", "reward_model") else None

    return RowRules(columns, problem)


COLUMNS = {
    "rl": ("prompt_key", "answer_key"),
    "sft": ("prompt_key", "response_key"),
    "dpo": ("prompt_key", "chosen_key", "rejected_key"),
    "reward_model": ("prompt_key", "chosen_key", "rejected_key"),
}

Finding = tuple[str, str]
"""(reason, fix); ("", ""): nothing wrong."""
FINE: Finding = ("", "")
NEEDS_TEMPLATE: Finding = ("chat messages need a chat template", "data.apply_chat_template=true")


def _prompt(value: Any, name: str, data: DataConfig) -> Finding:
    if isinstance(value, list) and value and not data.apply_chat_template:
        return NEEDS_TEMPLATE
    if not value or not isinstance(value, str) and not is_conversation(value):
        return f"{name} must be a text or a list of messages with role and content, and not empty", CORRECT
    return FINE


def _answer(value: Any, name: str, data: DataConfig) -> Finding:
    return FINE if isinstance(value, str | int | float) else (f"{name} must be a text or a number", CORRECT)


def _response(value: Any, name: str, data: DataConfig) -> Finding:
    return FINE if isinstance(value, str) and value else (f"{name} must be a text, and not empty", CORRECT)


def _continuation(value: Any, name: str, data: DataConfig) -> Finding:
    if not isinstance(value, list):
        return _response(value, name, data)
    return _messages(value, name, data) if data.apply_chat_template else NEEDS_TEMPLATE


def _messages(value: Any, name: str, data: DataConfig) -> Finding:
    if not is_conversation(value):
        return f"{name} must be a list of messages with role and content", CORRECT
    if not any(message["role"] == "assistant" for message in value):
        return f"{name} has no message of the assistant, so there is nothing to learn from it", CORRECT
    return FINE


def _margin(value: Any, name: str, data: DataConfig) -> Finding:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    return FINE if is_number and value >= 0 else (f"{name} must be a number, 0 or more", CORRECT)


def _anything(value: Any, name: str, data: DataConfig) -> Finding:
    return FINE  # told when the prompts are read, with all their rows


CELLS: dict[str, Callable[[Any, str, DataConfig], Finding]] = {
    "prompt_key": _prompt,
    "answer_key": _answer,
    "curriculum_key": _anything,
    "reward_fn_key": _anything,
    "response_key": _response,
    "messages_key": _messages,
    "chosen_key": _continuation,
    "rejected_key": _continuation,
    "margin_key": _margin,
}


def _equal_pair(row: Row, where: str, data: DataConfig) -> Problem | None:
    if row[data.chosen_key] != row[data.rejected_key]:
        return None
    reason = f"{data.chosen_key!r} and {data.rejected_key!r} are the same, so neither is better"
    return Problem(where, row[data.chosen_key], reason, CORRECT)


def is_conversation(value: Any) -> bool:
    """A list of messages with role and content, and at least one."""

    def is_message(m: Any) -> bool:
        return isinstance(m, dict) and {"role", "content"} <= m.keys() and isinstance(m["content"], str)

    return isinstance(value, list) and bool(value) and all(map(is_message, value))
