"""Which code allocated what on a GPU, in a file that https://docs.pytorch.org/memory_viz draws."""

from pathlib import Path

import torch

MAX_ENTRIES = 100_000
"""The latest allocations and releases that are remembered, each with its stack; PyTorch's own example has as many."""


class AllocationHistory:
    """Of this process, from now on."""

    def __init__(self, file: Path):
        self.file = file
        torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES)

    def write(self) -> str:
        """Where it is, for whoever reads about the error it goes with."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(self.file))
        except OSError as error:  # a full disk must not hide why the run ended
            return f"the history of allocations could not be written: {error}"
        return f"history of allocations: {self.file}, to be opened at https://docs.pytorch.org/memory_viz"
