"""Through a shared file system: safetensors written by the trainer, read by the engines."""

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors.torch import save_file

from rlhf_mp.rollout.sglang_client import EngineControl
from rlhf_mp.weights.buckets import Bucket
from rlhf_mp.weights.fleet import Fleet


class DiskTransport:
    """One file a bucket, in a folder that is removed once the engines have read it."""

    shared_buffers = False
    all_or_none = False

    def __init__(self, folder: Path, is_sender: bool):
        self._folder, self._is_sender = folder, is_sender
        self._num_files = 0
        self._writer = ThreadPoolExecutor(1)

    def connect(self, fleet: Fleet) -> None:
        self._fleet, self._num_files = fleet, 0

    def start(self, bucket: Bucket) -> Callable[[], None]:
        if not self._is_sender:
            return lambda: None
        if self._num_files == 0:
            shutil.rmtree(self._folder, ignore_errors=True)  # of a run that was killed in the middle of a swap
            self._folder.mkdir(parents=True)
        self._num_files += 1
        file = self._folder / f"model-{self._num_files:05d}.safetensors"
        return self._writer.submit(save_file, dict(bucket.tensors()), file).result

    def finish(self) -> None:
        self._fleet.each(self._load)

    def release(self) -> None:
        shutil.rmtree(self._folder)  # not before: a worker that finds no folder looks for it on a model hub

    def _load(self, engine: EngineControl) -> None:
        engine.call("/update_weights_from_disk", model_path=str(self._folder), flush_cache=False)
