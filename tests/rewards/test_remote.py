"""A scoring service over real HTTP: batches, and whatever can be wrong with an answer."""

import asyncio
import time

import pytest
from aiohttp import web

from rlhf_mp.config.reward import RemoteTerm
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.rewards.base import Failure, Response, Setting
from rlhf_mp.rewards.remote import RemoteReward


def made(service, **knobs) -> RemoteReward:
    term = RemoteTerm("remote", url=f"{service.url}/score", **({"timeout_s": 2.0, "batch_wait_s": 0.1} | knobs))
    return RemoteReward(term, Setting(startup_timeout_s=1.0))


async def by_length(request):
    items = (await request.json())["items"]
    return web.json_response({"scores": [len(item["response"]) / 10 for item in items]})


async def scores(reward, *texts, index=0):
    prompt = Prompt(index, [1], f"question {index}", f"answer {index}", "web")
    found = await reward.score(prompt, [Response(text) for text in texts])
    return [score.kind if isinstance(score, Failure) else score for score in found]


def test_groups_that_come_together_share_a_request(service, serving):
    async def test():
        service.handler = by_length
        reward = made(service)
        assert (await reward.start()).startswith(f"{service.url}/score")
        assert await asyncio.gather(scores(reward, "a", "bb"), scores(reward, "ccc", index=1)) == [[0.1, 0.2], [0.3]]
        (asked,) = service.requests
        assert asked["items"][2] == {
            "prompt": "question 1", "response": "ccc", "answer": "answer 1", "source": "web",
        }  # fmt: skip
        await reward.close()

    serving(test)


def test_full_batches_do_not_wait_and_none_is_larger(service, serving):
    async def test():
        service.handler = by_length
        reward, started = made(service, batch_size=4, batch_wait_s=30.0), time.monotonic()
        found = await asyncio.gather(*(scores(reward, *["x" * n] * 2) for n in range(6)))
        assert found == [[n / 10] * 2 for n in range(6)]
        assert [len(asked["items"]) for asked in service.requests] == [4, 4, 4]
        assert time.monotonic() - started < 5
        await reward.close()

    serving(test)


@pytest.mark.parametrize(
    ("body", "kinds"),
    [
        ('{"scores": [1.0]}', ["count"] * 2),
        ('{"scores": [1, 2, 3]}', ["count"] * 2),
        ('{"scores": "1, 2"}', ["garbage"] * 2),
        ('{"score": [1, 2]}', ["garbage"] * 2),
        ("[1, 2]", ["garbage"] * 2),
        ("oops", ["garbage"] * 2),
        ('{"scores": [null, 0.5]}', ["garbage", 0.5]),
    ],
)
def test_an_answer_of_the_wrong_shape_fails_what_it_is_for(service, serving, body, kinds):
    async def handler(request):
        return web.Response(text=body, content_type="application/json")

    async def test():
        service.handler = handler
        reward = made(service)
        assert await scores(reward, "a", "b") == kinds
        await reward.close()

    serving(test)


def test_a_service_that_hangs_holds_up_its_own_batch_alone(service, serving):
    async def handler(request):
        if any(item["response"] == "hang" for item in (await request.json())["items"]):
            await asyncio.sleep(1000)
        return await by_length(request)

    async def test():
        service.handler = handler
        reward = made(service, batch_size=2, timeout_s=1.0)
        stuck = asyncio.create_task(scores(reward, "hang", "hang"))
        assert await scores(reward, "a", "b") == [0.1, 0.1]
        assert not stuck.done()
        assert await stuck == ["timeout", "timeout"]
        await reward.close()

    serving(test)


def test_a_service_that_is_gone_fails_at_the_deadline(service):
    async def test():
        reward, started = made(service, timeout_s=0.5), time.monotonic()
        assert await scores(reward, "a", "b") == ["unavailable"] * 2
        assert time.monotonic() - started < 3
        await reward.close()

    asyncio.run(test())
