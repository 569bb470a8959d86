"""Several ranks of a collective, as threads of one test."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch


def on_ranks(work: Callable[[Any, Callable], Any], shares: Sequence[Any]) -> list[Any]:
    """``work(share, sum_over_ranks)`` of every rank at once; what each returns."""
    barrier = threading.Barrier(len(shares))
    slots: list[Any] = [None] * len(shares)
    results: list[Any] = [None] * len(shares)

    def run(rank: int) -> None:
        def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
            slots[rank] = x
            barrier.wait(20)
            total = torch.stack(slots).sum(0)
            barrier.wait(20)
            return total

        try:
            results[rank] = work(shares[rank], sum_over_ranks)
        except BaseException as error:
            results[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(shares))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
