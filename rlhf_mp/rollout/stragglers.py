"""Over-sampling: more is started than needed, and what is not among the first to end is given up."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def first_complete(calls: Iterable[Coroutine[Any, Any, T]], num: int) -> dict[int, T]:
    """The results of the first ``num`` calls that end, by their positions, in order; the others are cancelled.

    The first failure cancels all, and is raised as itself.
    """
    tasks = [asyncio.create_task(call) for call in calls]
    position = {task: i for i, task in enumerate(tasks)}
    found: dict[int, T] = {}
    waiting = set(tasks)
    try:
        while len(found) < num:
            ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(ended, key=position.__getitem__)[: num - len(found)]:
                found[position[task]] = task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return dict(sorted(found.items()))
