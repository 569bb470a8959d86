"""The engine's side of a swap: runs inside every SGLang worker process, sees every tensor whatever carried it.

``arriving`` wraps what reaches the model's own ``load_weights``; ``commit`` compares it with the sender's manifest.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator

from torch import Tensor

from rlhf_mp.config.lora_checks import PEFT_PREFIX
from rlhf_mp.weights.manifest import Manifest, TensorRecord, differences


class Receiver:
    """What has arrived of the version on its way, in one worker process."""

    def __init__(self) -> None:
        self.arrived: list[TensorRecord] = []
        self.adapter: dict[str, Tensor] = {}  # what has arrived of one
        self.own_names: list[str] = []  # of the checkpoint this engine was started from
        self.seconds = 0.0  # spent on checksums of this version
        # The sender fills two buffers in shared memory by turns. A mapping that lives is used again; a new one for
        # every bucket would cost a page fault for every 4 KiB.
        self.mapped: deque[Tensor] = deque(maxlen=2)

    def arriving(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Record each tensor as the model takes it. An adapter's are none of the model's: they are kept."""
        for name, tensor in weights:
            start = time.perf_counter()
            self.arrived.append(TensorRecord.of(name, tensor))
            self.seconds += time.perf_counter() - start
            if name.startswith(PEFT_PREFIX):
                self.adapter[name] = tensor.clone()  # where it lies, the next bucket will be
            else:
                yield name, tensor

    def adopt(self, tied_embeddings: bool) -> None:
        """What has arrived was the engine's own checkpoint. A tied head may be stored there but is never sent."""
        self.own_names = [r.name for r in self.arrived if not (tied_embeddings and r.name == "lm_head.weight")]

    def begin(self) -> None:
        """A new version starts; whatever an aborted one left behind is forgotten."""
        self.arrived, self.adapter, self.seconds = [], {}, 0.0

    def commit(self, manifest: Manifest) -> list[str]:
        """Differences between ``manifest`` and what has arrived since ``begin``."""
        return differences(manifest, self.arrived, self.own_names)
