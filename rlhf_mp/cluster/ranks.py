"""The launched ranks among themselves: torch.distributed, or nothing for a single process."""

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhf_mp.cluster.first_failure import wait_until
from rlhf_mp.errors import ConfigError, Problem

GLOO_THREADS = "pt_gloo_runloop"
REST_S, PATIENCE_S = 0.05, 10


class Ranks:
    """Object-level collectives, for set-up and small messages."""

    def __init__(self, rank: int, num_ranks: int):
        self.rank, self.num_ranks = rank, num_ranks

    def barrier(self) -> None:
        if self.num_ranks > 1:
            dist.barrier()

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.num_ranks == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        if self.num_ranks == 1:
            return [value]
        values = [None] * self.num_ranks
        dist.all_gather_object(values, value)
        return values

    def sum(self, value: torch.Tensor, *, counts: bool) -> torch.Tensor:
        """Of the ranks that count, added in their order: the same digits on every rank.

        Args:
            counts: False where another rank has the same data, as a part of the same model.
        """
        return torch.stack([x for x in self.gather(value.cpu() if counts else None) if x is not None]).sum(0)


def check_shared(run_dir: Path, ranks: Ranks) -> None:
    """Collective. Checkpoints, logs and reports of failures need one folder that every machine sees.

    Raises:
        ConfigError: a machine does not see what rank 0 writes there.
    """
    proof = run_dir / f".seen_by_all.{ranks.broadcast(socket.gethostname())}"
    if ranks.rank == 0:
        proof.touch()
    ranks.barrier()
    blind = {host for host in ranks.gather(None if proof.exists() else socket.gethostname()) if host}
    if ranks.rank == 0:
        proof.unlink()
    if blind:
        raise not_shared(run_dir, sorted(blind))


def not_shared(run_dir: Path, hosts: Sequence[str]) -> ConfigError:
    reason = f"what rank 0 writes there does not appear on {', '.join(hosts)}"
    fix = "trainer.default_local_dir=<a folder on a file system that all machines share>"
    return ConfigError([Problem("trainer.default_local_dir", str(run_dir), reason, fix)])


def leave_ranks() -> None:
    """The end of torch.distributed in this process, after the last collective.

    A group that a library still holds keeps its threads, and gloo's drop the tensors of a collective a little after it
    is over. Dropped while the interpreter ends, one aborts the process: the thread asks for the GIL, and CPython before
    3.14 ends it by unwinding through C++ that allows no exceptions. So wait until they rest.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        wait_until(_gloo_rests, PATIENCE_S)


def _gloo_rests() -> bool:
    """Asleep twice in a row: in between, one that only waited for the GIL has had it."""
    asleep = _gloo_asleep()
    time.sleep(REST_S)
    return asleep and _gloo_asleep()


def _gloo_asleep() -> bool:
    for thread in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):  # it has just ended
            name, _, state = thread.read_text().rpartition(") ")
            if name.endswith(GLOO_THREADS) and not state.startswith("S"):
                return False
    return True
