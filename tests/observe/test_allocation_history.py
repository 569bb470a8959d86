"""The history of a GPU's allocations is written when they end in an error. Recording itself needs a GPU."""

import pytest
import torch

from rlhf_mp.errors import OutOfMemory
from rlhf_mp.observe.allocation_history import AllocationHistory
from rlhf_mp.observe.memory_watch import MemoryWatch
from rlhf_mp.phase import Phase


@pytest.fixture
def dumped(monkeypatch) -> list[str]:
    """Files that CUDA was asked to write."""
    files: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda max_entries: None)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", files.append)
    return files


def failing(history: AllocationHistory, error: Exception) -> str:
    """What is said of ``error`` in a phase."""
    watch = MemoryWatch(torch.device("cpu"), 0, lambda phase: [], history=history)
    with pytest.raises((OutOfMemory, KeyError)) as caught, watch.during(Phase.train):
        raise error
    return str(caught.value)


def test_running_out_of_memory_writes_it_and_says_where(dumped, tmp_path):
    file = tmp_path / "logs" / "memory_rank_0.pickle"
    text = failing(AllocationHistory(file), torch.OutOfMemoryError("CUDA out of memory"))
    assert dumped == [str(file)] and file.parent.is_dir()
    assert f"history of allocations: {file}" in text


def test_any_other_error_writes_nothing(dumped, tmp_path):
    failing(AllocationHistory(tmp_path / "x"), KeyError("y"))
    assert dumped == []


def test_a_disk_that_is_full_does_not_hide_the_error(dumped, tmp_path, monkeypatch):
    def full(file: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", full)
    text = failing(AllocationHistory(tmp_path / "x"), MemoryError("no more"))
    assert "ran out of host memory in phase train: no more" in text and "No space left on device" in text
