"""The engines of one swap, as the sending rank sees them. One that is lost on the way is left out from there on."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

from rlhf_mp.errors import EngineLost
from rlhf_mp.rollout.sglang_client import EngineControl

T = TypeVar("T")


class Roster(Protocol):
    """Whoever knows which engines there are. Asked on the sending rank only."""

    size: int  # how many there may be

    def targets(self) -> list[EngineControl]:
        """A swap begins: the engines that it goes to; the same object while it is the same server."""
        ...

    def lost(self, engine: EngineControl, error: EngineLost) -> None:
        """One of them does not answer. Raises ``error`` if the run cannot do without it."""
        ...

    def settle(self, version: int, engines: Sequence[EngineControl]) -> None:
        """These are proved to serve ``version``."""
        ...

    def rest(self) -> None:
        """No engine serves any version until the next swap has settled."""
        ...


class FixedRoster:
    """Engines that nobody replaces: whoever started them sees to them."""

    def __init__(self, engines: Sequence[EngineControl]):
        self._engines, self.size = list(engines), len(engines)

    def targets(self) -> list[EngineControl]:
        return self._engines

    def lost(self, engine: EngineControl, error: EngineLost) -> None:
        raise error

    def settle(self, version: int, engines: Sequence[EngineControl]) -> None:
        pass

    def rest(self) -> None:
        pass


class Fleet:
    """Empty on ranks that do not send."""

    def __init__(self, roster: Roster):
        self._roster = roster
        self._pool = ThreadPoolExecutor(max(1, roster.size), "engine call")
        self.live: list[EngineControl] = []
        self.num_lost = 0  # of the swap that is going on

    def muster(self) -> None:
        """A swap begins."""
        self.live, self.num_lost = list(self._roster.targets()), 0

    def start(self, act: Callable[[EngineControl], T]) -> Callable[[], list[T]]:
        """Begin ``act`` on all engines at once. The result waits for all; it is what those that are left answered.

        Raises (when waiting):
            EngineError: one refused; after all have answered.
        """
        calls = [(engine, self._pool.submit(act, engine)) for engine in self.live]
        return lambda: self._answers(calls)

    def each(self, act: Callable[[EngineControl], T]) -> list[T]:
        return self.start(act)()

    def settle(self, version: int) -> None:
        """The swap has ended, and what is left of the engines serves ``version``."""
        self._roster.settle(version, self.live)

    def rest(self) -> None:
        """Nobody may sample until the next swap."""
        self._roster.rest()

    def _answers(self, calls: Sequence[tuple[EngineControl, Future]]) -> list:
        answers, refusals = [], []
        for engine, call in calls:
            error = call.exception()
            if error is None:
                answers.append(call.result())
            elif isinstance(error, EngineLost):
                self._drop(engine, error)
            else:
                refusals.append(error)
        if refusals:
            raise refusals[0]
        return answers

    def _drop(self, engine: EngineControl, error: EngineLost) -> None:
        if engine in self.live:  # else: lost in an earlier call that was under way at the same time
            self.live.remove(engine)
            self.num_lost += 1
            self._roster.lost(engine, error)
