"""Same host: engines map the trainer's buffer. Shared memory on CPU, a CUDA IPC handle on a GPU."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple

from rlhf_mp.rollout.sglang_client import EngineControl
from rlhf_mp.rollout.sglang_plugin import BUCKET_FORMAT
from rlhf_mp.weights.buckets import Bucket
from rlhf_mp.weights.encoding import encode


class TensorTransport:
    """Only handles travel over HTTP."""

    shared_buffers = True

    def __init__(self, workers_per_engine: int, gather: Callable[[list[str]], list[list[str]]], on_cpu: bool):
        """
        Args:
            gather: collective; every rank's list, on every rank.
        """
        self._workers, self._gather, self._on_cpu = workers_per_engine, gather, on_cpu
        if not on_cpu:
            from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

            monkey_patch_torch_reductions()  # handles name a GPU by UUID: an engine numbers its GPUs by its own list
        self._engines: list[EngineControl] = []

    def connect(self, engines: Sequence[EngineControl]) -> None:
        self._engines = list(engines)
        self._pool = ThreadPoolExecutor(len(self._engines))

    def start(self, bucket: Bucket) -> Callable[[], None]:
        loads = [
            self._pool.submit(self._load, engine, handles)
            for engine, handles in zip(self._engines, self._handles(bucket), strict=True)
        ]

        def wait() -> None:
            for load in loads:
                load.result()
            self._gather([])  # engines read the buffers of all ranks: each keeps its own until the sender is done

        return wait

    def _handles(self, bucket: Bucket) -> list[list[str]]:
        """For each engine, one handle per worker.

        On CPU all map the sender's buffer. A GPU's memory can be mapped only by a process that sees this GPU, so
        worker w of engine e maps the buffer of the rank it shares its GPU with.
        """
        payload = {"slots": [astuple(slot) for slot in bucket.slots], "data": bucket.data}
        if self._on_cpu:
            return [[encode(payload) for _ in range(self._workers)] for _ in self._engines]
        handles = [own[0] for own in self._gather([encode(payload)])]
        return [handles[start : start + self._workers] for start in range(0, len(handles), self._workers)]

    def _load(self, engine: EngineControl, handles: list[str]) -> None:
        engine.call(
            "/update_weights_from_tensor",
            serialized_named_tensors=handles,
            load_format=BUCKET_FORMAT,
            flush_cache=False,
        )

    def finish(self) -> None:
        pass
