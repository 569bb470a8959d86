"""What the scheduler needs of a rollout engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class SamplingParams:
    """How to draw responses."""

    temperature: float
    top_p: float
    top_k: int  # -1: all
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """One response as the engine drew it, stop token included."""

    ids: list[int]
    logprobs: list[float]  # after temperature, before nucleus and top-k
    finish_reason: Literal["stop", "length", "abort"]
    version: int  # of the weights when it ended


class RolloutEngine(Protocol):
    async def generate(
        self, prompt_ids: list[int], params: SamplingParams, seeds: Sequence[int | None]
    ) -> list[Completion]:
        """One response per seed. A seed fixes its response for given weights; None leaves it to the engine."""
        ...
