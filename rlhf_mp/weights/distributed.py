"""Across hosts: the sending rank broadcasts to every engine worker, over NCCL on GPUs and gloo on CPU."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rlhf_mp.errors import EngineError
from rlhf_mp.rollout.sglang_client import EngineControl
from rlhf_mp.rollout.sglang_server import free_port
from rlhf_mp.weights.buckets import Bucket
from rlhf_mp.weights.fleet import Fleet


class DistributedTransport:
    """One process group of the sender (rank 0) and all workers of all engines; a new one when an engine goes or comes.

    A death breaks the group for everybody in it: what follows of that version is not sent, and the swap is done again.
    """

    shared_buffers = False
    all_or_none = True

    def __init__(self, workers_per_engine: int, host: str, on_cpu: bool, timeout_s: float = 600):
        """
        Args:
            host: address of the sending rank as the engines see it.
            timeout_s: for a worker that does not take part.
        """
        self._workers, self._host = workers_per_engine, host
        self._backend, self._timeout = "gloo" if on_cpu else "nccl", timedelta(seconds=timeout_s)
        self._fleet: Fleet | None = None  # where this rank does not send
        self._joined: list[EngineControl] = []  # the workers of these are in the group
        self._group: Any = None

    def connect(self, fleet: Fleet) -> None:
        self._fleet = fleet
        if fleet.live != self._joined:
            self._leave()
            self._join()

    def _leave(self) -> None:
        if self._group is None:
            return
        name, left = self._group_name, [engine for engine in self._fleet.live if engine in self._joined]
        dist.destroy_process_group(self._group)
        self._group, self._joined = None, []
        self._tolerated(
            self._fleet.start(
                lambda engine: engine.call("/destroy_weights_update_group", group_name=name) if engine in left else None
            )
        )

    def _join(self) -> None:
        from sglang.srt.utils import init_custom_process_group  # SGLang's own counterpart of its update group

        engines = list(self._fleet.live)
        if not engines:
            return
        port, size = free_port(), 1 + self._workers * len(engines)
        self._group_name = f"rlhf_mp_weights_{port}"  # torch wants a name of its own for every group of a process
        joins = self._fleet.start(
            lambda engine: engine.call(
                "/init_weights_update_group",
                master_address=self._host,
                master_port=port,
                rank_offset=1 + engines.index(engine) * self._workers,
                world_size=size,
                group_name=self._group_name,
                backend=self._backend,
            )
        )
        failed = None
        try:
            self._group = init_custom_process_group(
                backend=self._backend,
                # a store of our own: at a tcp:// address a rank that torchrun started takes the store for torchrun's
                store=dist.PrefixStore(self._group_name, dist.TCPStore(self._host, port, size, True, self._timeout)),
                timeout=self._timeout,
                world_size=size,
                rank=0,
                group_name=self._group_name,
            )
            self._joined = engines
        except RuntimeError as error:  # somebody did not come
            failed = error
        self._tolerated(joins)
        if failed and not self._fleet.num_lost:
            raise failed

    def start(self, bucket: Bucket) -> Callable[[], None]:
        if self._fleet is None or not self._fleet.live or self._fleet.num_lost:
            return lambda: None
        request = {
            "names": [slot.name for slot in bucket.slots],
            "dtypes": [slot.dtype for slot in bucket.slots],
            "shapes": [list(slot.shape) for slot in bucket.slots],
            "group_name": self._group_name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        loads = self._fleet.start(lambda engine: engine.call("/update_weights_from_distributed", **request))
        broadcast = dist.broadcast(bucket.data, src=0, group=self._group, async_op=True)

        def wait() -> None:
            failed = None
            try:
                broadcast.wait()
            except RuntimeError as error:  # a worker is gone
                failed = error
            self._tolerated(loads)
            if failed and not self._fleet.num_lost:
                raise failed

        return wait

    def _tolerated(self, answers: Callable[[], list]) -> None:
        """Wait. Where an engine is lost, the refusals of others follow from that."""
        try:
            answers()
        except EngineError:
            if not self._fleet.num_lost:
                raise

    def finish(self) -> None:
        pass

    def release(self) -> None:
        pass
