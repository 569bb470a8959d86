"""A response that weight swaps interrupt: what it has so far, and how it goes on."""

from dataclasses import dataclass, field
from typing import Literal

from rlhf_mp.rollout.base import Completion, SamplingParams

MAX_FRUITLESS = 100
"""Interruptions in a row without a token. A swap interrupts a response once; so many are no swaps."""


@dataclass
class PartialResponse:
    """Pieces of one response, each drawn by one weight version.

    An engine gives up every response at a swap and forgets the keys and values computed with the old weights; the
    next piece is asked for with prompt and tokens so far as its prompt. So each token's log-prob is exactly that of
    its own version, as the trainer of that version would compute it. A seed's draws depend on the position in the
    sequence alone: without a change of weights the pieces are the tokens that would have come anyway.
    """

    prompt_ids: list[int]
    params: SamplingParams
    seed: int | None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    version: int = -1  # of the first token
    finish_reason: Literal["stop", "length", "abort"] = "abort"
    fruitless: int = 0

    @property
    def done(self) -> bool:
        return self.finish_reason != "abort"

    @property
    def context(self) -> list[int]:
        """What the next piece continues."""
        return self.prompt_ids + self.ids

    @property
    def tokens_left(self) -> int:
        return self.params.max_new_tokens - len(self.ids)

    def add(self, piece: Completion) -> None:
        if not self.ids:
            self.version = piece.version
        self.ids += piece.ids
        self.logprobs += piece.logprobs
        self.versions += piece.token_versions
        self.fruitless = 0 if piece.ids else self.fruitless + 1
        self.finish_reason = self._reason(piece)

    def _reason(self, piece: Completion) -> Literal["stop", "length", "abort"]:
        """An interrupted response may just have come to its end: the engine tells only that it was interrupted."""
        if piece.finish_reason != "abort":
            return piece.finish_reason
        if self.ids and self.ids[-1] in self.params.stop_token_ids:
            return "stop"
        return "abort" if self.tokens_left > 0 else "length"

    def completion(self) -> Completion:
        """The whole response."""
        return Completion(self.ids, self.logprobs, self.finish_reason, self.version, self.versions)
