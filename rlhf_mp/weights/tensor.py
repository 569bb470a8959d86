"""Same host: engines map the trainer's buffer. Shared memory on CPU, a CUDA IPC handle on a GPU."""

from collections.abc import Callable
from dataclasses import astuple

from rlhf_mp.rollout.sglang_client import EngineControl
from rlhf_mp.rollout.sglang_plugin import BUCKET_FORMAT
from rlhf_mp.weights.buckets import Bucket
from rlhf_mp.weights.encoding import encode
from rlhf_mp.weights.fleet import Fleet


class TensorTransport:
    """Only handles travel over HTTP."""

    shared_buffers = True
    all_or_none = False

    def __init__(self, workers_per_engine: int, gather: Callable[[list[str]], list[list[str]]], on_cpu: bool):
        """
        Args:
            gather: collective; every rank's list, on every rank.
        """
        self._workers, self._gather, self._on_cpu = workers_per_engine, gather, on_cpu
        if not on_cpu:
            from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

            monkey_patch_torch_reductions()  # handles name a GPU by UUID: an engine numbers its GPUs by its own list
        self._fleet: Fleet | None = None  # where this rank does not send

    def connect(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def start(self, bucket: Bucket) -> Callable[[], None]:
        handles = self._handles(bucket)
        loaded = self._fleet.start(lambda engine: self._load(engine, handles[engine])) if self._fleet else None

        def wait() -> None:
            if loaded:
                loaded()
            self._gather([])  # engines read the buffers of all ranks: each keeps its own until the sender is done

        return wait

    def _handles(self, bucket: Bucket) -> dict[EngineControl, list[str]]:
        """For each engine, one handle per worker.

        On CPU all map the sender's buffer. A GPU's memory can be mapped only by a process that sees this GPU, so
        worker w of engine e maps the buffer of the rank it shares its GPU with.
        """
        payload = {"slots": [astuple(slot) for slot in bucket.slots], "data": bucket.data}
        engines = self._fleet.live if self._fleet else []
        if self._on_cpu:
            return {engine: [encode(payload) for _ in range(self._workers)] for engine in engines}
        handles = [own[0] for own in self._gather([encode(payload)])]
        width = self._workers
        return {engine: handles[engine.index * width : (engine.index + 1) * width] for engine in engines}

    def _load(self, engine: EngineControl, handles: list[str]) -> None:
        engine.call(
            "/update_weights_from_tensor",
            serialized_named_tensors=handles,
            load_format=BUCKET_FORMAT,
            flush_cache=False,
        )

    def finish(self) -> None:
        pass

    def release(self) -> None:
        pass
