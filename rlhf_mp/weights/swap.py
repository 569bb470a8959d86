"""A swap as the trainer sees it: push, then prove with a canary that the engines compute what the trainer does."""

import time
from collections.abc import Callable
from typing import Any

from rlhf_mp.data.collate import collate
from rlhf_mp.data.types import Sums
from rlhf_mp.train.base import TrainEngine
from rlhf_mp.weights.base import WeightSync
from rlhf_mp.weights.canary import Canary


class VerifiedSwap:
    """Collective."""

    def __init__(self, sync: WeightSync, canary: Canary, broadcast: Callable[[Any], Any]):
        """
        Args:
            broadcast: collective; rank 0's value, on every rank.
        """
        self.sync, self.canary, self.broadcast = sync, canary, broadcast

    def push(self, actor: TrainEngine, version: int, *, must_differ: bool) -> Sums:
        """When it returns, every engine that answers samples from the actor's weights, as ``version``.

        Raises:
            SyncError: they do not arrive whole, or engine and trainer disagree afterwards.
        """
        sampled = None
        while sampled is None:  # again where a lost engine has spoilt it for the others
            metrics = self.sync.push(actor.weights(), version, must_differ=must_differ)
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
