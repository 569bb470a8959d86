"""Code that may hang, crash, fork or eat memory, in a process of its own that is ended with what it started.

A deadline inside the process would not do: a single C call can take for ever (\\boxed{10^{10^{10}}}), where neither a
thread nor a Python signal handler gets a turn.
"""

import asyncio
import multiprocessing
import os
import queue
import resource
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import psutil

from rlhf_mp.errors import RewardError

EXIT_TIMEOUT_S = 10.0
START_TIMEOUT_S = 120.0  # imports, on a busy machine
GRACE_S = 1.0  # the process's own alarm goes first; the parent's patience is for one that switched it off
OUT_OF_MEMORY = 77  # exit code

Work = Callable[..., Any]


class WorkerDied(RuntimeError):
    """The process ended, or had to be ended, before it answered."""

    def __init__(self, kind: str, reason: str):
        self.kind = kind  # timeout, memory, crash
        super().__init__(reason)


class WorkFailed(RuntimeError):
    """The work raised; the process is fine."""


class Worker:
    """One process, used for many calls, one at a time, from any one thread at a time.

    Args:
        prepare: importable; makes the work in the new process, where importing may take seconds.
        timeout_s: for one call.
        memory_mb: address space of the process, beyond what it has once the work is prepared.
    """

    def __init__(self, prepare: Callable[..., Work], arguments: tuple, *, timeout_s: float, memory_mb: int):
        context = multiprocessing.get_context("spawn")  # forking a process with threads (gRPC, CUDA) can deadlock
        self._timeout_s, self._memory_mb = timeout_s, memory_mb
        self._connection, theirs = context.Pipe()
        self.process = context.Process(
            target=serve, args=(theirs, prepare, arguments, timeout_s, memory_mb), name="reward", daemon=True
        )
        self.process.start()
        theirs.close()  # else this process would keep the worker's end open, and never notice that it died
        try:
            if not self._connection.poll(START_TIMEOUT_S):
                raise TimeoutError
            ready, reason = self._connection.recv()
        except (EOFError, OSError, TimeoutError):
            exit_code = self._buried()
            reason = f"did not start (exit code {exit_code}); its error is printed above"
            raise RuntimeError(f"a reward's process {reason}") from None
        if not ready:
            self.close()
            raise WorkFailed(reason)

    def call(self, *arguments: Any) -> Any:
        """What the work returns.

        Raises:
            WorkerDied: no answer in time, or no process any more. This worker is of no use from then on.
            WorkFailed: it raised.
        """
        try:
            self._connection.send(arguments)
            if not self._connection.poll(self._timeout_s + GRACE_S):
                self.close()
                raise WorkerDied("timeout", f"no answer in {self._timeout_s:g} s")
            ok, result = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._death(self._buried()) from error
        if not ok:
            raise WorkFailed(result)
        return result

    def close(self) -> None:
        """End the process with everything it started."""
        self._connection.close()
        end_tree(self.process.pid)
        self.process.join()

    def _buried(self) -> int | None:
        """Exit code of a process whose end of the connection is closed; it gets time to end by itself."""
        self.process.join(timeout=EXIT_TIMEOUT_S)
        self.close()
        return self.process.exitcode

    def _death(self, exit_code: int | None) -> WorkerDied:
        if exit_code == -signal.SIGALRM:
            return WorkerDied("timeout", f"no answer in {self._timeout_s:g} s")
        if exit_code == OUT_OF_MEMORY:
            return WorkerDied("memory", f"more than {self._memory_mb} MB of memory (memory_mb)")
        return WorkerDied("crash", f"its process ended with code {exit_code}")


def end_tree(pid: int) -> None:
    """Kill a process, its process group and its descendants."""
    try:
        found = [*psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        found = []
    try:
        os.killpg(pid, signal.SIGKILL)  # serve() made the group; also what lost its parent is still in it
    except (ProcessLookupError, PermissionError):
        pass
    for process in found:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass


def serve(connection: Connection, prepare: Callable, arguments: tuple, timeout_s: float, memory_mb: int) -> None:
    """The process: answer until the other end is closed, which also happens when the parent dies."""
    os.setsid()  # a group of its own, to be ended as one; Ctrl-C is for the parent
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel itself ends the process: nothing can delay that
    own = os.getpid()
    try:
        work = prepare(*arguments)
    except Exception as error:
        connection.send((False, describe(error)))
        return
    allowed = address_space() + (memory_mb << 20)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
    connection.send((True, ""))
    while True:
        try:
            call = connection.recv()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            answer = (True, work(*call))
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except Exception as error:
            answer = (False, describe(error))
        if os.getpid() != own:  # the work forked, and this is the copy: it must not answer too
            os._exit(0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send(answer)


def address_space() -> int:
    """Bytes of this process's, see proc_pid_statm(5)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]


class WorkerPool:
    """As many workers as calls may run at once, each started by the first call that needs it."""

    def __init__(
        self, prepare: Callable[..., Work], arguments: tuple = (), *, size: int, timeout_s: float, memory_mb: int
    ):
        self._start = lambda: Worker(prepare, arguments, timeout_s=timeout_s, memory_mb=memory_mb)
        self._threads = ThreadPoolExecutor(max_workers=size, thread_name_prefix="reward")
        self._idle: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()
        for _ in range(size):
            self._idle.put(None)
        self.workers: set[Worker] = set()

    async def start(self, name: str) -> None:
        """Start one worker now: what cannot work says so early, and the first group does not wait for imports.

        Raises:
            RewardError: what the work needs is not there.
        """
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._warm)
        except RuntimeError as error:  # did not start, or could not prepare the work
            raise RewardError(f"reward {name}: {error}") from error

    async def call(self, *arguments: Any) -> Any:
        """Run the work in a free worker. Raises what ``Worker.call`` raises."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._call, arguments)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)  # waits for calls under way, a deadline at most
        for worker in self.workers:
            worker.close()
        self.workers.clear()

    def _warm(self) -> None:
        worker = self._idle.get()
        try:
            worker = worker or self._started()
        finally:
            self._idle.put(worker)

    def _call(self, arguments: tuple) -> Any:
        worker = self._idle.get()
        try:
            worker = worker or self._started()
            return worker.call(*arguments)
        except WorkerDied:
            self.workers.discard(worker)
            worker = None
            raise
        finally:
            self._idle.put(worker)

    def _started(self) -> Worker:
        worker = self._start()
        self.workers.add(worker)
        return worker
