"""A file in the run directory asks the job to save and stop: a batch script or a person makes it. Stdlib only."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

STOP, STOPPED = "stop", "stopped"


class StopRequest:
    """``<run_dir>/stop`` is the wish; ``<run_dir>/stopped`` says that it was fulfilled."""

    def __init__(self, run_dir: Path, is_first_rank: bool, broadcast: Callable[[Any], Any]):
        """
        Args:
            broadcast: collective; rank 0's value, on every rank.
        """
        self._stop, self._stopped = run_dir / STOP, run_dir / STOPPED
        self._is_first_rank, self._broadcast = is_first_rank, broadcast
        if is_first_rank:  # left by an earlier run
            self._stop.unlink(missing_ok=True)
            self._stopped.unlink(missing_ok=True)

    def made(self) -> bool:
        """Collective. One look by one rank: all must stop after the same step."""
        return self._broadcast(self._is_first_rank and self._stop.exists())

    def fulfil(self) -> None:
        """The checkpoint is written."""
        if self._is_first_rank:
            self._stop.replace(self._stopped)
