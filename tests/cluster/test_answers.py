"""All ranks hear the same, whoever asks first and however late the others are."""

import asyncio

import pytest

from rlhf_mp.cluster.answers import Answers


class Scene:
    """Sampling that ends, and a swap that is needed, when the test says so."""

    def __init__(self):
        self.sampled, self.needed = asyncio.Event(), asyncio.Event()
        self.answers = Answers(self.needed.wait)

    async def work(self) -> str:
        await self.sampled.wait()
        return "a share"


def test_every_rank_gets_the_result():
    async def run():
        scene = Scene()
        ranks = [asyncio.create_task(scene.answers.to(1, scene.work)) for _ in range(3)]
        await asyncio.sleep(0)
        scene.sampled.set()
        assert await asyncio.gather(*ranks) == ["a share"] * 3

    asyncio.run(run())


def test_a_rank_that_asks_late_hears_what_the_first_was_told():
    """Otherwise the first would push weights, which takes all ranks, and the last would train."""

    async def run():
        scene = Scene()
        first = asyncio.create_task(scene.answers.to(1, scene.work))
        await asyncio.sleep(0)
        scene.needed.set()
        assert await first is None
        scene.sampled.set()
        assert await scene.answers.to(1, scene.work) is None
        assert [await scene.answers.to(2, scene.work) for _ in range(2)] == ["a share"] * 2

    asyncio.run(run())


def test_a_result_goes_before_a_swap():
    async def run():
        scene = Scene()
        scene.sampled.set()
        scene.needed.set()
        assert await scene.answers.to(1, scene.work) == "a share"

    asyncio.run(run())


def test_an_error_reaches_every_rank():
    async def run():
        async def fails():
            raise ValueError("no")

        answers = Answers(asyncio.Event().wait)
        for _ in range(2):
            with pytest.raises(ValueError, match="no"):
                await answers.to(1, fails)

    asyncio.run(run())
