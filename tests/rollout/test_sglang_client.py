"""Both clients against a real HTTP server in a thread: what they send, and what they make of answers and of none."""

import asyncio
import contextlib
import io
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rlhf_mp.errors import EngineError, EngineLost, SyncError
from rlhf_mp.rollout.base import Completion, SamplingParams
from rlhf_mp.rollout.sglang_client import EngineControl, SGLangClient, completion_of
from rlhf_mp.rollout.sglang_server import Address

PARAMS = SamplingParams(temperature=0.7, top_p=0.9, top_k=-1, max_new_tokens=5, stop_token_ids=(1, 7))


def answer(ids=(4, 5, 1), logprobs=(-0.5, -1.5, -0.25), reason="stop", version="3") -> dict:
    """One response as SGLang 0.5 writes it, fields we do not read included."""
    return {
        "text": "",
        "output_ids": list(ids),
        "meta_info": {
            "id": "f00",
            "finish_reason": {"type": reason, "matched": 1},
            "prompt_tokens": 2,
            "weight_version": version,
            "output_token_logprobs": [[p, i, None] for p, i in zip(logprobs, ids, strict=True)],
        },
    }


class Server(ThreadingHTTPServer):
    """Answers as ``reply`` says and keeps what it was asked."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, str, dict]] = []
        self.reply = lambda path, body: (200, [answer()])

    @property
    def address(self) -> Address:
        return Address(f"http://127.0.0.1:{self.server_port}", "the-key")


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, self.headers["Authorization"], body))
        status, content = self.server.reply(self.path, body)
        if status is None:  # hang up
            self.connection.close()
            return
        text = content if isinstance(content, str) else json.dumps(content)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        self.headers["Content-Length"] = "2"
        self.rfile = io.BytesIO(b"{}")
        self.do_POST()

    def log_message(self, *_):
        pass

    def handle(self):
        with contextlib.suppress(ConnectionError, ValueError):  # we hung up, or the client did
            super().handle()


@pytest.fixture
def server():
    with Server() as running:
        threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield running
        running.shutdown()


def generate(server: Server, seeds=(11, 12), timeout_s: float = 10) -> list[Completion]:
    async def run():
        client = SGLangClient("engine 0", server.address, timeout_s)
        try:
            return await client.generate([8, 9], PARAMS, seeds)
        finally:
            await client.close()

    return asyncio.run(run())


def control(server: Server, timeout_s: float = 10) -> EngineControl:
    return EngineControl("engine 0", server.address, timeout_s)


def test_a_response_is_its_tokens_their_logprobs_why_it_ended_and_who_sampled_it():
    assert completion_of(answer()) == Completion([4, 5, 1], [-0.5, -1.5, -0.25], "stop", 3)
    assert completion_of(answer(reason="length")).finish_reason == "length"
    assert completion_of(answer(version="default")).version == -1  # the weights it started with are no version of ours


def test_a_group_is_one_request_with_a_seed_for_each_response(server):
    server.reply = lambda path, body: (200, [answer(ids=(i, 4, 1)) for i in (20, 21)])
    assert [c.ids[0] for c in generate(server)] == [20, 21]
    (path, key, body), *others = server.requests
    assert (path, key, others) == ("/generate", "Bearer the-key", [])
    shared = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "max_new_tokens": 5, "stop_token_ids": [1, 7]}
    assert len(set(body.pop("rid"))) == 2
    assert body == {
        "input_ids": [[8, 9], [8, 9]],
        "sampling_params": [shared | {"sampling_seed": 11}, shared | {"sampling_seed": 12}],
        "return_logprob": True,
    }


def test_without_a_seed_none_is_sent(server):
    generate(server, seeds=[None])
    assert "sampling_seed" not in server.requests[0][2]["sampling_params"][0]


def test_a_refusal_is_an_error_with_the_engines_words(server):
    server.reply = lambda path, body: (500, "the KV cache is full " + "x" * 9000)
    with pytest.raises(EngineError, match="engine 0: /generate answered 500: the KV cache is full") as error:
        generate(server)
    assert len(str(error.value)) < 700
    with pytest.raises(EngineError, match="engine 0: /pause_generation answered 500: the KV cache is full"):
        control(server).pause()


def test_an_engine_that_hangs_up_is_an_error(server):
    server.reply = lambda path, body: (None, None)
    with pytest.raises(EngineError, match="engine 0: /generate failed: ServerDisconnectedError"):
        generate(server)
    with pytest.raises(EngineError, match="engine 0: /continue_generation failed: ConnectionError"):
        control(server).resume()


def test_an_engine_that_is_gone_is_an_error(server):
    server.shutdown()
    server.server_close()
    with pytest.raises(EngineError, match="engine 0: /generate failed: ClientConnectorError"):
        generate(server)
    with pytest.raises(EngineError, match="engine 0: /pause_generation failed: ConnectionError"):
        control(server).pause()


def test_no_answer_in_time_is_an_error_that_names_the_knob(server):
    server.reply = lambda path, body: (time.sleep(0.6), (200, []))[1]
    with pytest.raises(
        EngineError, match=r"/generate gave no answer in 0\.2 s \(actor_rollout_ref.rollout.request_timeout_s\)"
    ):
        generate(server, timeout_s=0.2)
    with pytest.raises(EngineError, match=r"/x gave no answer in 0\.2 s \(actor_rollout_ref.weight_sync.timeout_s\)"):
        control(server, timeout_s=0.2).call("/x")


def test_who_does_not_answer_or_fails_inside_is_lost_and_who_refuses_is_not(server):
    def kind(status) -> type:
        server.reply = lambda path, body: (status, "words")
        with pytest.raises(EngineError) as error:
            generate(server)
        with pytest.raises(EngineError) as other:
            control(server).pause()
        assert error.type is other.type
        return error.type

    assert {status: kind(status) for status in (400, 500, 503, None)} == {
        400: EngineError,
        500: EngineLost,
        503: EngineLost,
        None: EngineLost,
    }


def test_a_commit_that_gets_no_answer_is_a_loss_and_no_refusal(server):
    server.reply = lambda path, body: (None, None)
    with pytest.raises(EngineLost):
        control(server).commit(["m"], 41)


def check(server: Server, timeout_s: float) -> None:
    async def run():
        client = SGLangClient("engine 0", server.address, timeout_s=10)
        try:
            await client.check(timeout_s)
        finally:
            await client.close()

    asyncio.run(run())


def test_a_check_is_a_question_with_a_limit_of_its_own(server):
    server.reply = lambda path, body: (200, {"internal_states": []})
    check(server, 10)
    assert server.requests == [("/server_info", "Bearer the-key", {})]
    server.reply = lambda path, body: (time.sleep(0.6), (200, {}))[1]
    with pytest.raises(EngineLost, match=r"no answer in 0\.2 s \(actor_rollout_ref.rollout.health_check_timeout_s\)"):
        check(server, 0.2)


def test_calls_that_a_healthy_engine_answers_at_once_have_a_shorter_limit(server):
    server.reply = lambda path, body: (time.sleep(0.6), (200, {"message": "verify_s=0.1 "}))[1]
    engine = EngineControl("engine 0", server.address, 10, prompt_s=0.2)
    for act in (engine.pause, engine.resume, engine.flush, lambda: engine.begin(["a"])):
        with pytest.raises(EngineLost, match=r"\(actor_rollout_ref.rollout.health_check_timeout_s\)"):
            act()
    assert engine.commit(["m"], 1) == 0.1


def test_engines_are_reached_past_a_proxy(server, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")  # nobody listens there
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert len(generate(server, seeds=[11])) == 1
    server.reply = lambda path, body: (200, {})
    control(server).pause()


def test_the_control_side_sends_its_key_with_every_request(server):
    server.reply = lambda path, body: (200, {})
    engine = control(server)
    engine.pause()
    engine.resume()
    engine.begin(["a", "b"])
    assert [(path, key) for path, key, _ in server.requests] == [
        ("/pause_generation", "Bearer the-key"),
        ("/continue_generation", "Bearer the-key"),
        ("/update_weights_from_tensor", "Bearer the-key"),
    ]
    assert server.requests[0][2] == {"mode": "abort"}
    assert server.requests[2][2]["serialized_named_tensors"] == ["a", "b"]


def test_a_commit_names_its_version_and_forgets_cached_prefixes(server):
    server.reply = lambda path, body: (200, {"success": True, "message": "verify_s=0.125000 tail"})
    assert control(server).commit(["m"], 41) == 0.125
    body = server.requests[0][2]
    assert (body["weight_version"], body["flush_cache"]) == ("41", True)


def test_a_refused_commit_is_an_error_of_the_swap_with_engine_version_and_reason(server):
    server.reply = lambda path, body: (400, {"success": False, "message": "worker 0: norm.weight arrived twice"})
    with pytest.raises(SyncError, match=r"engine 0 refused weight version 41: .*norm\.weight arrived twice"):
        control(server).commit(["m"], 41)


def test_the_canary_is_a_sample_of_fixed_length_and_seed(server):
    server.reply = lambda path, body: (200, answer())
    assert control(server).sample([8, 9], 3, temperature=0.7) == completion_of(answer())
    sampling = server.requests[0][2]["sampling_params"]
    assert sampling == {"max_new_tokens": 3, "temperature": 0.7, "ignore_eos": True, "sampling_seed": 0}
