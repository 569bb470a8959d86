"""Across hosts: the sending rank broadcasts to every engine worker, over NCCL on GPUs and gloo on CPU."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from rlhf_mp.rollout.sglang_client import EngineControl
from rlhf_mp.rollout.sglang_server import free_port
from rlhf_mp.weights.buckets import Bucket


class DistributedTransport:
    """One process group of the sender (rank 0) and all workers of all engines."""

    shared_buffers = False

    def __init__(self, workers_per_engine: int, host: str, on_cpu: bool):
        """
        Args:
            host: address of the sending rank as the engines see it.
        """
        self._workers, self._host = workers_per_engine, host
        self._backend = "gloo" if on_cpu else "nccl"
        self._engines: list[EngineControl] = []

    def connect(self, engines: Sequence[EngineControl]) -> None:
        from sglang.srt.utils import init_custom_process_group  # SGLang's own counterpart of its update group

        self._engines = list(engines)
        self._pool = ThreadPoolExecutor(len(self._engines))
        port, size = free_port(), 1 + self._workers * len(self._engines)
        self._group_name = f"rlhf_mp_weights_{port}"  # torch wants a name of its own for every group of a process
        joins = [
            self._pool.submit(
                engine.call,
                "/init_weights_update_group",
                master_address=self._host,
                master_port=port,
                rank_offset=1 + index * self._workers,
                world_size=size,
                group_name=self._group_name,
                backend=self._backend,
            )
            for index, engine in enumerate(self._engines)
        ]
        self._group = init_custom_process_group(
            backend=self._backend,
            init_method=f"tcp://{self._host}:{port}",
            world_size=size,
            rank=0,
            group_name=self._group_name,
        )
        for join in joins:
            join.result()

    def start(self, bucket: Bucket) -> Callable[[], None]:
        if not self._engines:
            return lambda: None
        request = {
            "names": [slot.name for slot in bucket.slots],
            "dtypes": [slot.dtype for slot in bucket.slots],
            "shapes": [list(slot.shape) for slot in bucket.slots],
            "group_name": self._group_name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        loads = [
            self._pool.submit(engine.call, "/update_weights_from_distributed", **request) for engine in self._engines
        ]
        broadcast = dist.broadcast(bucket.data, src=0, group=self._group, async_op=True)

        def wait() -> None:
            broadcast.wait()
            for load in loads:
                load.result()

        return wait

    def finish(self) -> None:
        pass
