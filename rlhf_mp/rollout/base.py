"""What the scheduler needs of a rollout engine."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from rlhf_mp.data.types import Sums

T = TypeVar("T")


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
    version: int  # of the weights that drew its first token: the oldest
    versions: list[int] | None = None  # of the weights that drew each token; None: all of them ``version``

    @property
    def token_versions(self) -> list[int]:
        return [self.version] * len(self.ids) if self.versions is None else self.versions


class RolloutEngine(Protocol):
    async def generate(
        self, prompt_ids: list[int], params: SamplingParams, seeds: Sequence[int | None]
    ) -> list[Completion]:
        """One response per seed. A seed fixes its response for given weights; None leaves it to the engine."""
        ...


class Engines(Protocol):
    """All rollout engines together."""

    async def run(self, num_responses: int, work: Callable[[RolloutEngine], Awaitable[T]]) -> T:
        """Do ``work`` with one of them; from the start and with another one, where that one is lost on the way."""
        ...

    def metrics(self) -> Sums:
        """What happened to them since this was asked last."""
        ...


class RewardServer(Protocol):
    async def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """What the reward model says of each sequence of token ids."""
        ...


class RewardServers(Protocol):
    """All servers of the reward model together."""

    async def run(self, num_responses: int, work: Callable[[RewardServer], Awaitable[T]]) -> T:
        """As ``Engines.run``."""
        ...

    def metrics(self) -> Sums:
        """What happened to them since this was asked last."""
        ...


class FixedEngines:
    """Engines that nobody watches or replaces: whoever started them sees to them."""

    def __init__(self, engines: Sequence[RolloutEngine]):
        self._engines = list(engines)
        self._in_flight = [0] * len(self._engines)

    async def run(self, num_responses: int, work: Callable[[RolloutEngine], Awaitable[T]]) -> T:
        index = min(range(len(self._engines)), key=self._in_flight.__getitem__)
        self._in_flight[index] += num_responses
        try:
            return await work(self._engines[index])
        finally:
            self._in_flight[index] -= num_responses

    def metrics(self) -> Sums:
        return {}
