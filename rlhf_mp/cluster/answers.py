"""What all ranks are told when they ask the scheduler for something that takes sampling."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class Answers:
    """The ranks' so-manieth question gets one answer, whoever asks first: a push of weights takes all of them.

    Args:
        swap_needed: waits until sampling cannot go on without a swap.
    """

    def __init__(self, swap_needed: Callable[[], Awaitable[None]]):
        self._swap_needed = swap_needed
        self._answers: dict[int, asyncio.Task] = {}

    async def to(self, number: int, work: Callable[[], Awaitable[T]]) -> T | None:
        """The result of ``work``, or None if the ranks must push their weights first and ask again."""
        if number not in self._answers:
            self._answers[number] = asyncio.create_task(self._answer(work()))
            self._answers.pop(number - 2, None)  # no rank is two questions behind: there are collectives in between
        return await asyncio.shield(self._answers[number])

    async def _answer(self, work: Awaitable[T]) -> T | None:
        job, swap = asyncio.ensure_future(work), asyncio.ensure_future(self._swap_needed())
        try:
            await asyncio.wait({job, swap}, return_when=asyncio.FIRST_COMPLETED)
            return job.result() if job.done() else None
        finally:
            job.cancel()
            swap.cancel()
