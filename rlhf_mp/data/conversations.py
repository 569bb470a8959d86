"""Conversations as texts in turn, some of them to be learned: what the policy would write, and only that."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_mp.config.schema import DataConfig
from rlhf_mp.data.prompts import Tokenizer

Message = dict[str, str]


@dataclass(frozen=True)
class Piece:
    """A text that is tokenized by itself, as a sampled response is apart from its prompt."""

    text: str
    is_learned: bool
    special: bool = False  # the tokenizer adds what its model expects at the start of raw text


class Unsuitable(ValueError):
    """A conversation that the chat template does not write turn after turn."""


def text_pieces(prompt: str, response: str) -> list[Piece]:
    """Raw text, without a chat template."""
    return [Piece(prompt, is_learned=False, special=True), Piece(response, is_learned=True)]


def chat_pieces(messages: Sequence[Message], tokenizer: Tokenizer) -> list[Piece]:
    """The whole conversation as the chat template writes it; the assistant's turns are learned.

    Raises:
        Unsuitable: what the template wrote for the first turns is not the beginning of what it writes for all.
    """
    pieces: list[Piece] = []
    written = ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked = _rendered(messages[:number], tokenizer, add_generation_prompt=True)
        answered = _rendered(messages[: number + 1], tokenizer, add_generation_prompt=False)
        if not (asked.startswith(written) and answered.startswith(asked)):
            raise Unsuitable(
                f"the chat template writes message {number + 1} differently once others follow: "
                "make one row of each answer, with the messages before it"
            )
        pieces.append(Piece(asked[len(written) :], is_learned=False))
        pieces.append(Piece(answered[len(asked) :], is_learned=True))
        written = answered
    return pieces


def _rendered(messages: Sequence[Message], tokenizer: Tokenizer, *, add_generation_prompt: bool) -> str:
    return tokenizer.apply_chat_template([*messages], tokenize=False, add_generation_prompt=add_generation_prompt)


def opening(prompt: str | list[Message], data: DataConfig) -> list[Message]:
    """The messages that a prompt is."""
    if not isinstance(prompt, str):
        return prompt
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    return [*system, {"role": "user", "content": prompt}]


def answered(prompt: str | list[Message], response: str | list[Message], data: DataConfig) -> list[Message]:
    """A prompt with a response: a text, the messages that follow, or the whole conversation again."""
    messages = opening(prompt, data)
    if isinstance(response, str):
        return [*messages, {"role": "assistant", "content": response}]
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    repeats = response[: len(asked)] == asked
    return [*messages, *(response[len(asked) :] if repeats else response)]


def pieces_of(row: dict[str, Any], response_key: str, data: DataConfig, tokenizer: Tokenizer) -> list[Piece]:
    """A row's prompt with one of its responses.

    Raises:
        Unsuitable: see ``chat_pieces``.
    """
    prompt, response = row[data.prompt_key], row[response_key]
    if not data.apply_chat_template:
        return text_pieces(prompt, response)
    return chat_pieces(answered(prompt, response, data), tokenizer)
