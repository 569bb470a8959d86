"""A checkpoint's files as they will be, in host memory: written while training goes on."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class Snapshot:
    """Copies of what goes into files of this rank."""

    def __init__(self) -> None:
        self._files: list[tuple[Path, Any]] = []

    def add(self, file: Path, state: Any) -> None:
        copies: dict[tuple, Tensor] = {}  # tied weights have two names and one copy

        def copied(tensor: Tensor) -> Tensor:
            place = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride())
            if place not in copies:
                copies[place] = tensor.detach().to("cpu", copy=True)
            return copies[place]

        self._files.append((file, tree_map_only(Tensor, copied, state)))

    def write(self) -> None:
        for file, state in self._files:
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, file)
        self._files.clear()

    def finish(self) -> None:
        """Every rank's files are its own."""
