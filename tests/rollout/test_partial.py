"""Responses that swaps interrupt: pieces, versions, ends; on a server that answers as SGLang does."""

import asyncio
import threading

import pytest
from test_sglang_client import PARAMS, answer, generate, server

from rlhf_mp.errors import EngineError
from rlhf_mp.rollout.base import Completion
from rlhf_mp.rollout.partial import MAX_FRUITLESS, PartialResponse
from rlhf_mp.rollout.sglang_client import SGLangClient

__all__ = ["server"]  # a fixture


def partial() -> PartialResponse:
    return PartialResponse([8, 9], PARAMS, 11)


def test_pieces_add_up_and_every_token_keeps_its_version():
    response = partial()
    response.add(Completion([4, 5], [-0.5, -1.0], "abort", 3))
    assert (response.done, response.context, response.tokens_left) == (False, [8, 9, 4, 5], 3)
    response.add(Completion([6], [-2.0], "abort", 4))
    response.add(Completion([7], [-3.0], "stop", 6))
    assert response.completion() == Completion([4, 5, 6, 7], [-0.5, -1.0, -2.0, -3.0], "stop", 3, [3, 3, 4, 6])


def test_the_version_is_of_the_first_token_not_of_an_interruption_before_it():
    response = partial()
    response.add(Completion([], [], "abort", 3))  # it was still waiting for its turn
    response.add(Completion([4], [-1.0], "stop", 4))
    assert response.completion() == Completion([4], [-1.0], "stop", 4, [4])


@pytest.mark.parametrize(("ids", "reason"), [([4, 7], "stop"), ([4] * 5, "length"), ([4], "abort")])
def test_an_interruption_at_the_end_of_a_response_is_its_end(ids, reason):
    response = partial()
    response.add(Completion(ids, [-0.5] * len(ids), "abort", 3))
    assert response.finish_reason == reason


def test_only_what_is_not_done_is_asked_for_again(server):
    answers = {
        (8, 9): [answer(ids=(4, 5), logprobs=(-1, -2), reason="abort"), answer(ids=(2, 1), logprobs=(-3, -4))],
        (8, 9, 4, 5): [answer(ids=(6, 1), logprobs=(-5, -6), version="4")],
    }  # fmt: skip
    server.reply = lambda path, body: (200, answers[tuple(body["input_ids"][0])])
    first, second = generate(server)
    assert first == Completion([4, 5, 6, 1], [-1, -2, -5, -6], "stop", 3, [3, 3, 4, 4])
    assert second == Completion([2, 1], [-3, -4], "stop", 3, [3, 3])
    again = server.requests[1][2]
    assert again["input_ids"] == [[8, 9, 4, 5]]
    assert again["sampling_params"][0]["max_new_tokens"] == 3
    assert again["sampling_params"][0]["sampling_seed"] == 11


def test_an_engine_that_only_ever_aborts_is_an_error(server):
    server.reply = lambda path, body: (200, [answer(ids=(), logprobs=(), reason="abort")])
    with pytest.raises(EngineError, match="engine 0: aborted a response"):
        generate(server, seeds=[11])
    assert len(server.requests) == MAX_FRUITLESS + 1


def test_what_nobody_waits_for_any_more_is_aborted_by_its_name(server):
    gate = threading.Event()
    server.reply = lambda path, body: (200, {}) if path == "/abort_request" else (gate.wait(10), (200, []))[1]

    async def run():
        client = SGLangClient("engine 0", server.address, timeout_s=10)
        try:
            waiting = asyncio.create_task(client.generate([8, 9], PARAMS, [11, 12]))
            while not server.requests:
                await asyncio.sleep(0.01)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            while client._aborts:
                await asyncio.sleep(0.01)
        finally:
            gate.set()
            await client.close()

    asyncio.run(run())
    (_, _, asked), *aborts = server.requests
    assert {path for path, _, _ in aborts} == {"/abort_request"}
    assert sorted(body["rid"] for _, _, body in aborts) == sorted(asked["rid"])
