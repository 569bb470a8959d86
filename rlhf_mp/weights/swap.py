"""A swap as the trainer sees it: push, then prove with a canary that the engines compute what the trainer does.

With it the turn changes where trainer and engines share GPUs: between sampling and the next swap the engines may sleep,
and from there on the trainer may keep no more than it sends.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from rlhf_mp.cluster.first_failure import wait_until
from rlhf_mp.data.collate import collate
from rlhf_mp.data.types import Sums
from rlhf_mp.errors import SyncError
from rlhf_mp.train.base import TrainEngine
from rlhf_mp.train.parking import Parking
from rlhf_mp.weights.base import WeightSync
from rlhf_mp.weights.canary import Canary

RELEASE_S = 5.0
Sent = Callable[[TrainEngine], Iterator[tuple[str, Tensor]]]
"""Collective: the tensors of a version."""


def whole_model(actor: TrainEngine) -> Iterator[tuple[str, Tensor]]:
    return actor.weights()


class VerifiedSwap:
    """Collective."""

    def __init__(
        self,
        sync: WeightSync,
        canary: Canary,
        broadcast: Callable[[Any], Any],
        *,
        sleeps: bool = False,
        free_bytes: Callable[[], int] | None = None,
        parking: Parking | None = None,
        sent: Sent = whole_model,
    ):
        """
        Args:
            broadcast: collective; rank 0's value, on every rank.
            sleeps: engines give their memory back between sampling and the next swap.
            free_bytes: of this rank's GPU, which an engine has too; None on a CPU.
            parking: takes out what this rank does not need while engines sample; None: it keeps everything.
            sent: what a swap brings.
        """
        self.sync, self.canary, self.broadcast = sync, canary, broadcast
        self.sleeps, self.free_bytes, self.parking = sleeps, free_bytes, parking or Parking()
        self.sent = sent

    def sleep(self) -> Sums:
        """Once a step's responses are there: the trainer's turn. The engines' memory is free on every GPU by then.

        Raises:
            SyncError: they say so, and it is not.
        """
        if not self.sleeps:
            return self.parking.back()
        start, metrics = time.perf_counter(), {}
        if self.sync.is_sender:
            freed = self._freed()
            metrics = {"sleep/s": (time.perf_counter() - start, 1), "sleep/freed_bytes": (freed, 1)}
        self.broadcast(None)  # no rank goes on before
        return metrics | self.parking.back()

    def reclaim(self) -> None:
        """For what needs the whole trainer out of turn, as a checkpoint does. The next question wakes the engines."""
        if self.parking.is_out:
            self.sleep()

    def _freed(self) -> int:
        before = self.free_bytes() if self.free_bytes else 0
        self.sync.sleep()
        if self.free_bytes is None:
            return 0
        if not wait_until(lambda: self.free_bytes() > before, RELEASE_S):
            raise SyncError(
                f"the engines were told to sleep, and {RELEASE_S:g} s later this GPU has no more free memory than "
                "before; fix: actor_rollout_ref.rollout.free_cache_engine=false"
            )
        return self.free_bytes() - before

    def push(self, actor: TrainEngine, version: int, *, must_differ: bool) -> Sums:
        """When it returns, every engine that answers samples from the actor's weights, as ``version``.

        Raises:
            SyncError: they do not arrive whole, or engine and trainer disagree afterwards.
        """
        sampled, parked = None, self.parking.out()
        while sampled is None:  # again where a lost engine has spoilt it for the others
            metrics = parked | self.sync.push(self.sent(actor), version, must_differ=must_differ)
            start = time.perf_counter()
            fleet = self.sync.fleet
            sampled = self.broadcast(fleet.each(self.canary.sample) if self.sync.whole else None)
        scored = actor.score([collate(sampled)])[0] if sampled else None
        if not self.sync.is_sender:
            return metrics
        if sampled:
            metrics |= self.canary.check([engine.name for engine in fleet.live], sampled, scored, version)
        fleet.settle(version)
        return metrics | {"sync/canary_s": (time.perf_counter() - start, 1)}
