"""The first of many, by hand."""

import asyncio

import pytest

from rlhf_mp.rollout.stragglers import first_complete


def test_the_first_to_end_are_taken_in_order_and_the_others_cancelled():
    async def run():
        gates, cancelled = [asyncio.Event() for _ in range(4)], []

        async def call(i: int) -> str:
            try:
                await gates[i].wait()
            except asyncio.CancelledError:
                cancelled.append(i)
                raise
            return f"result {i}"

        waiting = asyncio.create_task(first_complete(map(call, range(4)), 2))
        for i in (3, 1):
            await asyncio.sleep(0)
            gates[i].set()
        assert list((await waiting).items()) == [(1, "result 1"), (3, "result 3")]
        assert cancelled == [0, 2]

    asyncio.run(run())


def test_a_failure_is_raised_as_itself_and_ends_the_rest():
    async def run():
        ended = []

        async def fail():
            raise ValueError("no")

        async def wait():
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        with pytest.raises(ValueError, match="no"):
            await first_complete([wait(), fail()], 1)
        assert ended == [True]

    asyncio.run(run())


def test_a_caller_that_gives_up_ends_all():
    async def run():
        ended = []

        async def wait():
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        waiting = asyncio.create_task(first_complete([wait(), wait()], 2))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert ended == [True, True]

    asyncio.run(run())
