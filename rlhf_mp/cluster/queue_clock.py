"""Who waits for whom: ranks for samples, or engines for a weight version. Plain Python."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rlhf_mp.data.types import Sums


@dataclass
class QueueClock:
    """Seconds between the engines and the ranks, told step by step as the ranks fetch.

    ``engines_idle_s``: nothing was being sampled for any step, because no version was live that allowed more.
    ``ranks_waited_s``: the first rank to ask for a step waited for its samples.
    ``sampling_s``: something was being sampled; pauses for swaps count, as requests wait through them.
    """

    now: Callable[[], float] = time.monotonic
    _sampling: int = 0  # steps that are being sampled
    _since: float = field(default=-1.0)  # the last change of that; -1: nothing has been sampled yet
    _idle_s: float = 0.0
    _busy_s: float = 0.0
    _asked: dict[int, float] = field(default_factory=dict)
    _told: tuple[int, Sums] = (-1, {})  # of the last step

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Around the sampling of one step."""
        self._advance()
        self._sampling += 1
        try:
            yield
        finally:
            self._advance()
            self._sampling -= 1

    def _advance(self) -> None:
        now = self.now()
        if self._since >= 0:
            if self._sampling:
                self._busy_s += now - self._since
            else:
                self._idle_s += now - self._since
        self._since = now

    def asked(self, step: int) -> None:
        """A rank asks for a step."""
        self._asked.setdefault(step, self.now())

    def served(self, step: int, *, ready: int) -> Sums:
        """The step is there for the ranks; seconds since the step before was. Asked again it tells the same.

        Args:
            ready: later steps whose samples are complete too.
        """
        if self._told[0] == step:
            return self._told[1]
        self._advance()
        waited, idle, busy = self.now() - self._asked[step], self._idle_s, self._busy_s
        self._asked = {later: since for later, since in self._asked.items() if later > step}
        self._idle_s = self._busy_s = 0.0
        self._told = (
            step,
            {
                "queue/ranks_waited_s": (waited, 1),
                "queue/engines_idle_s": (idle, 1),
                "queue/sampling_s": (busy, 1),
                "queue/steps_ready": (ready, 1),
            },
        )
        return self._told[1]
