"""A judge that answers well, badly, slowly, rudely or not at all, over real HTTP."""

import asyncio
import time

import pytest
from aiohttp import web

from rlhf_mp.config.reward import JudgeTerm
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.errors import RewardError
from rlhf_mp.rewards.base import Failure, Response, Setting
from rlhf_mp.rewards.judge import JudgeReward

PROMPT = Prompt(0, [1], "What is 6 * 7?", "42")


def made(service, startup_timeout_s=1.0, **knobs) -> JudgeReward:
    term = JudgeTerm("judge", base_url=f"{service.url}/v1", model="evaluator", **({"timeout_s": 2.0} | knobs))
    return JudgeReward(term, Setting(startup_timeout_s=startup_timeout_s))


def says(*contents):
    """A handler that says these in turn, the last one for ever."""
    left = list(contents)

    async def handler(request):
        content = left.pop(0) if len(left) > 1 else left[0]
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": content}}]})

    return handler


def fails(*statuses, then="Score: 10", headers=None):
    """A handler that answers these statuses first."""
    left, good = list(statuses), says(then)

    async def handler(request):
        if left:
            return web.Response(status=left.pop(0), text="no", headers=headers)
        return await good(request)

    return handler


async def scores(judge, *texts):
    found = await judge.score(PROMPT, [Response(text) for text in texts])
    return [score.kind if isinstance(score, Failure) else score for score in found]


def test_the_judge_reads_question_reference_and_response_and_its_last_score_counts(service, serving):
    async def test():
        service.handler = says("Score: 2 at first sight.\nBut no.\nScore: 7.5")
        judge = made(service)
        assert await judge.start() == f"evaluator at {service.url}/v1, 1 vote(s)"
        assert await scores(judge, "it is {42}") == [0.75]
        await judge.close()
        asked = service.requests[-1]
        assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("evaluator", 0.0, 512)
        (message,) = asked["messages"]
        assert all(part in message["content"] for part in ("What is 6 * 7?", "42", "it is {42}"))

    serving(test)


def test_votes_are_averaged_and_those_without_a_score_left_out(service, serving):
    async def test():
        service.handler = says("Score: 10", "I'd rather not", "Score: 5")
        judge = made(service, votes=3, temperature=0.7)
        assert await scores(judge, "42") == [0.75]  # (1 + 0.5) / 2
        await judge.close()

    serving(test)


@pytest.mark.parametrize("said", ["no idea", "Score: eleven", "Score: 11", "Score: -1", "", None, ["Score: 10"]])
def test_garbage_is_a_failure_and_no_zero(service, serving, said):
    async def test():
        service.handler = says(said)
        judge = made(service)
        assert await scores(judge, "42") == ["garbage"]
        await judge.close()

    serving(test)


@pytest.mark.parametrize("body", ["{}", "[]", "null", "not json", '{"choices": []}'])
def test_an_answer_that_is_no_chat_completion_is_garbage(service, serving, body):
    async def handler(request):
        return web.Response(text=body, content_type="application/json")

    async def test():
        service.handler = handler
        judge = made(service)
        assert await scores(judge, "42") == ["garbage"]
        await judge.close()

    serving(test)


@pytest.mark.parametrize("statuses", [[429], [500, 503], [502, 429, 504]])
def test_a_busy_judge_is_asked_again(service, serving, statuses):
    async def test():
        service.handler = fails(*statuses)
        judge = made(service, timeout_s=10.0)
        assert await scores(judge, "42") == [1.0]
        assert len(service.requests) == len(statuses) + 1
        await judge.close()

    serving(test)


def test_it_waits_as_long_as_it_is_told_to(service, serving):
    async def test():
        service.handler = fails(429, headers={"Retry-After": "1.2"})
        judge, started = made(service, timeout_s=10.0), time.monotonic()
        assert await scores(judge, "42") == [1.0]
        assert 1.2 <= time.monotonic() - started < 4
        await judge.close()

    serving(test)


@pytest.mark.parametrize(("status", "kind", "at_most"), [(429, "busy", 100), (500, "busy", 100), (401, "error", 1)])
def test_a_judge_that_keeps_refusing_is_a_failure_at_the_deadline(service, serving, status, kind, at_most):
    async def test():
        service.handler = fails(*[status] * 1000)
        judge, started = made(service, timeout_s=1.0), time.monotonic()
        assert await scores(judge, "42") == [kind]
        assert time.monotonic() - started < 3 and len(service.requests) <= at_most
        await judge.close()

    serving(test)


def test_a_judge_that_never_answers_is_given_up_at_the_deadline_and_others_are_served_meanwhile(service, serving):
    async def handler(request):
        if "hang" in (await request.json())["messages"][0]["content"]:
            await asyncio.sleep(1000)
        return await says("Score: 10")(request)

    async def test():
        service.handler = handler
        judge, started = made(service, timeout_s=1.0), time.monotonic()
        assert await scores(judge, "hang", "42", "hang", "42") == ["timeout", 1.0, "timeout", 1.0]
        assert time.monotonic() - started < 4
        await judge.close()

    serving(test)


def test_no_more_requests_at_once_than_allowed(service, serving):
    async def handler(request):
        await asyncio.sleep(0.1)
        return await says("Score: 10")(request)

    async def test():
        service.handler = handler
        judge = made(service, max_concurrency=3, timeout_s=1.0)  # waiting for a turn is no part of the deadline
        assert await scores(judge, *map(str, range(40))) == [1.0] * 40
        assert service.most_at_once == 3
        await judge.close()

    serving(test)


def test_a_judge_that_goes_away_fails_until_it_is_back(service, serving):
    async def test():
        service.handler = says("Score: 10")
        judge = made(service, timeout_s=1.0, max_concurrency=4)
        await judge.start()
        await service.down()
        started = time.monotonic()
        assert await scores(judge, *map(str, range(40))) == ["unavailable"] * 40
        assert time.monotonic() - started < 5  # not 40 / 4 deadlines of a second: after four nobody waits any more
        await service.up()
        assert await scores(judge, "42") == [1.0]
        await judge.close()

    serving(test)


def test_a_judge_that_is_down_at_the_start_ends_the_run(service):
    async def test():
        judge = made(service, startup_timeout_s=0.5)
        try:
            with pytest.raises(RewardError, match=rf"nothing answers at {service.url}/v1.*startup_timeout_s = 0.5"):
                await judge.start()
        finally:
            await judge.close()

    asyncio.run(test())


def test_a_judge_that_comes_up_late_is_waited_for(service):
    async def test():
        service.handler = says("Score: 10")
        judge = made(service, startup_timeout_s=20)
        starting = asyncio.create_task(judge.start())
        await asyncio.sleep(0.6)
        assert not starting.done()
        await service.up()
        await starting
        await judge.close()
        await service.down()

    asyncio.run(test())


def test_a_model_the_endpoint_does_not_know_ends_the_run(service, serving):
    async def test():
        service.handler = fails(404)
        judge = made(service)
        with pytest.raises(RewardError, match="judge evaluator: .*answered 404: no"):
            await judge.start()
        await judge.close()

    serving(test)


def test_the_key_comes_from_the_environment_and_must_be_there(service, serving, monkeypatch):
    async def test():
        service.handler = says("Score: 10")
        judge = made(service, api_key_env="RLHF_MP_TEST_KEY")
        with pytest.raises(RewardError, match="RLHF_MP_TEST_KEY, which is not set"):
            await judge.start()
        monkeypatch.setenv("RLHF_MP_TEST_KEY", "secret")
        await judge.start()
        assert service.headers[-1]["Authorization"] == "Bearer secret"
        await judge.close()

    serving(test)
