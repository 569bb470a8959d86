"""Ranks end well although gloo's threads still have tensors to drop."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torchrun import on_ranks

WORKER = Path(__file__).with_name("ending_worker.py")
PAIRS_AT_ONCE, NUM_PAIRS = 3, 24  # destroying the groups alone, every third to fifth of such pairs was aborted


@pytest.mark.engine
@pytest.mark.long
def test_ranks_that_end_right_after_a_collective_are_not_aborted(tmp_path):
    def end(number: int) -> None:
        folder = tmp_path / str(number)
        folder.mkdir()
        on_ranks(WORKER, 2, folder, str(1000 if number % 2 else 100_000))

    with ThreadPoolExecutor(PAIRS_AT_ONCE) as pool:
        list(pool.map(end, range(NUM_PAIRS)))
