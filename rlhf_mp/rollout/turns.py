"""Between turns: from an environment's text to the ids that stand between what the policy sampled.

Only that text is tokenized. What the policy sampled stays as it is: tokenizing its text again may give other ids, which
the policy never chose.
"""

from collections.abc import Sequence
from typing import Any, Protocol

ANSWER, ROLE = "ANSWER-0", "user"


class TurnTokenizer(Protocol):
    """What is used of a tokenizer."""

    def decode(self, ids: Any, *, skip_special_tokens: bool) -> str: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any: ...


class TurnEncoder:
    """Ids of an observation, wrapped as the next user message where prompts are chats."""

    def __init__(self, tokenizer: TurnTokenizer, *, chat: bool, stop_token_ids: Sequence[int], max_tokens: int):
        self._tokenizer, self.chat, self._max_tokens = tokenizer, chat, max_tokens
        self._stops = frozenset(stop_token_ids)

    def between(self, sampled: Sequence[int], observation: str) -> list[int]:
        """What follows a turn: its end where the policy did not write it, the observation, the next turn's beginning.

        Args:
            sampled: the turn's ids. If they end with a stop token, the template's is not written again.
        """
        if not self.chat:
            return self._cut(observation)
        text = self._after_answer(self._shortened(observation))
        if sampled and sampled[-1] in self._stops:
            text = text.removeprefix(self._tokenizer.decode([sampled[-1]], skip_special_tokens=False))
        return self._ids(text)

    def opening(self, observation: str) -> list[int]:
        """What follows a prompt that is no chat: the first observation."""
        return self._cut(observation) if observation else []

    def _after_answer(self, observation: str) -> str:
        """What the template writes from the end of an answer to the beginning of the next one."""
        conversation = [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": ANSWER},
            {"role": ROLE, "content": observation},
        ]
        text = self._tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        return text.partition(ANSWER)[2]

    def _shortened(self, text: str) -> str:
        ids = self._ids(text)
        if len(ids) <= self._max_tokens:
            return text
        return self._tokenizer.decode(ids[: self._max_tokens], skip_special_tokens=False)

    def _cut(self, text: str) -> list[int]:
        return self._ids(text)[: self._max_tokens]

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
