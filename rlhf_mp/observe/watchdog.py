"""Says what hangs. A collective waits for ever for a rank that died elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer


@contextmanager
def watch(what: str, timeout_s: float, on_timeout: Callable[[str], None]) -> Iterator[None]:
    """If the body lasts longer, call ``on_timeout`` with what to tell the user.

    That is done in the watchdog's own thread while the body is still stuck: end the process there.
    """
    reason = f"{what} lasted longer than {timeout_s:g} s (trainer.phase_timeout_s)"
    timer = Timer(timeout_s, on_timeout, [reason])
    timer.name, timer.daemon = f"watchdog of {what}", True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
