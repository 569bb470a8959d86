"""A process that compares mathematical expressions under a deadline.

Comparing can take for ever (\\boxed{10^{10^{10}}}) inside a single C call, where neither a thread nor a Python
signal handler gets a turn. math-verify's own time-out is such a handler, and works in a main thread only.
"""

import logging
import multiprocessing
import signal
from multiprocessing.connection import Connection

EXIT_TIMEOUT_S = 10.0


class WorkerDied(RuntimeError):
    """The process ended before it answered: the deadline passed, or the comparison crashed it."""


class MathWorker:
    """Started once, used for many comparisons, one at a time, from any one thread at a time."""

    def __init__(self, timeout_s: float):
        context = multiprocessing.get_context("spawn")  # forking a process with threads (gRPC, CUDA) can deadlock
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, timeout_s), name="math-verify", daemon=True)
        self._process.start()
        theirs.close()  # else this process would keep the worker's end open, and never notice that it died
        try:
            self._connection.recv()  # importing takes seconds that must not count against the first response
        except EOFError:
            exit_code = self._buried()
            raise RuntimeError(
                f"the process that runs math-verify did not start (exit code {exit_code}); its error is printed above"
            ) from None

    def matches(self, gold: str, response: str) -> bool:
        """Whether math-verify reads an expression in ``response`` that equals the one in ``gold``.

        Raises:
            WorkerDied: no answer in time. This worker is of no use any more.
        """
        try:
            self._connection.send((gold, response))
            return self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise WorkerDied(f"exit code {self._buried()}") from error

    def close(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.join()

    def _buried(self) -> int | None:
        """Exit code of a process whose end of the connection is closed; it gets time to end by itself."""
        self._process.join(timeout=EXIT_TIMEOUT_S)
        self.close()
        return self._process.exitcode


def serve(connection: Connection, timeout_s: float) -> None:
    """The worker: answer until the other end is closed, which also happens when the parent dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this process
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel itself ends the process: nothing can delay that
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time-outs are off
    connection.send("ready")
    while True:
        try:
            gold, response = connection.recv()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        gold, response = (parse(text, parsing_timeout=None) for text in (gold, response))
        equal = verify(gold, response, timeout_seconds=None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send(equal)
