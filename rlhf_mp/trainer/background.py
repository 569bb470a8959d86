"""One checkpoint on its way to disk while training goes on. Ranks meet between steps; threads never do."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from rlhf_mp.errors import CheckpointError
from rlhf_mp.train.base import Writing


class Ranks(Protocol):
    rank: int

    def gather(self, value: Any) -> list[Any]: ...


class Background:
    """First every rank writes; when all have, rank 0 seals. Every method is collective.

    Args:
        write: of this rank, all of ``writings``.
        seal: rank 0's last word: checksums, manifest, the name.
    """

    def __init__(self, ranks: Ranks, writings: Sequence[Writing], write: Callable[[], None], seal: Callable[[], None]):
        self.ranks, self.writings, self.seal = ranks, writings, seal
        self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._sealing = False
        self._work: Future = self._executor.submit(write)

    def landed(self, *, wait: bool) -> bool:
        """Whether the checkpoint is whole and has its name.

        Raises:
            CheckpointError: some rank could not write it.
        """
        if not self._sealing:
            if not self._all_ended(wait=wait):
                return False
            for writing in self.writings:
                writing.finish()
            self._sealing = True
            self._work = self._executor.submit(self.seal if self.ranks.rank == 0 else lambda: None)
        if not self._all_ended(wait=wait):
            return False
        self._executor.shutdown()
        return True

    def _all_ended(self, *, wait: bool) -> bool:
        if wait:
            self._work.exception()  # waits
        error = self._work.exception() if self._work.done() else None
        told = self.ranks.gather((self._work.done(), error and f"{type(error).__name__}: {error}"))
        failed = [(rank, text) for rank, (_, text) in enumerate(told) if text]
        if failed:
            rank, text = failed[0]
            raise CheckpointError(f"rank {rank} could not write the checkpoint: {text}")
        return all(done for done, _ in told)
