"""Says who hangs where. A collective waits for ever for a rank that died elsewhere."""

import faulthandler
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

from rlhf_mp.phase import Phase


@contextmanager
def watch(phase: Phase, rank: int, timeout_s: float, on_timeout: Callable[[], None]) -> Iterator[None]:
    """If the body lasts longer: name phase and rank, dump all threads' stacks to stderr, call ``on_timeout``.

    ``on_timeout`` runs in the watchdog's own thread while the body is still stuck: end the process there.
    """

    def report() -> None:
        try:
            print(
                f"rank {rank}: phase {phase.value} has lasted longer than {timeout_s:g} s (trainer.phase_timeout_s); "
                "the stacks of all threads:",
                file=sys.stderr,
                flush=True,
            )
            faulthandler.dump_traceback(sys.stderr)
        finally:  # stderr may be gone; the hang must end all the same
            on_timeout()

    timer = Timer(timeout_s, report)
    timer.name, timer.daemon = f"watchdog of {phase.value}", True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
