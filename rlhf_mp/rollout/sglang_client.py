"""Talking to an SGLang server: ``SGLangClient`` samples (asyncio), ``EngineControl`` changes its state (blocking)."""

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from typing import Any

import aiohttp
import requests

from rlhf_mp.errors import EngineError, EngineLost, SyncError
from rlhf_mp.rollout.base import Completion, SamplingParams
from rlhf_mp.rollout.partial import MAX_FRUITLESS, PartialResponse
from rlhf_mp.rollout.sglang_plugin import BEGIN_FORMAT, COMMIT_FORMAT
from rlhf_mp.rollout.sglang_server import Address

KEEP_ALIVE_S = 2.0
"""The server closes connections that were idle for 5 s. One used in that moment fails, so ours are given up before."""


WEIGHTS, BESIDE_WEIGHTS = ("weights",), ("kv_cache", "cuda_graph")
"""SGLang's names of what an engine that sleeps gives back."""

BROKEN = 500
"""An answer from here on is a failure inside the engine; a smaller one is a refusal, which another would repeat."""


def not_ok(engine: str, path: str, status: int, text: str) -> EngineError:
    kind = EngineLost if status >= BROKEN else EngineError
    return kind(engine, f"{path} answered {status}: {text}")


def completion_of(answer: dict[str, Any]) -> Completion:
    """SGLang's JSON for one response."""
    meta = answer["meta_info"]
    return Completion(
        ids=answer["output_ids"],
        logprobs=[entry[0] for entry in meta["output_token_logprobs"]],
        finish_reason=meta["finish_reason"]["type"],
        version=version_of(meta["weight_version"]),
    )


def version_of(label: str) -> int:
    """SGLang calls the weights it started with "default"; ours are numbers."""
    return -1 if label == "default" else int(label)


def sampling_of(response: PartialResponse) -> dict[str, Any]:
    """SGLang's parameters for the next piece of a response."""
    params = response.params
    shared = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "max_new_tokens": response.tokens_left,
        "stop_token_ids": list(params.stop_token_ids),
    }
    return shared if response.seed is None else shared | {"sampling_seed": response.seed}


class SGLangClient:
    """A RolloutEngine. Use it from one event loop. A response that a swap interrupts goes on with the new weights."""

    timeout_key = "actor_rollout_ref.rollout.request_timeout_s"

    def __init__(self, name: str, address: Address, timeout_s: float):
        self.name, self.address = name, address
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._aborts: set[asyncio.Task[None]] = set()  # a task that nobody holds may vanish

    async def generate(
        self, prompt_ids: list[int], params: SamplingParams, seeds: Sequence[int | None]
    ) -> list[Completion]:
        responses = [PartialResponse(prompt_ids, params, seed) for seed in seeds]
        while waiting := [response for response in responses if not response.done]:
            for response, piece in zip(waiting, await self._pieces(waiting), strict=True):
                response.add(piece)
                if response.fruitless > MAX_FRUITLESS:
                    raise EngineError(self.name, f"aborted a response {response.fruitless} times before its next token")
        return [response.completion() for response in responses]

    async def _pieces(self, responses: Sequence[PartialResponse]) -> list[Completion]:
        """What each response has until it ends, or until the next swap."""
        names = [secrets.token_hex(8) for _ in responses]
        try:
            answers = await self._post(
                "/generate",
                {
                    "rid": names,
                    "input_ids": [response.context for response in responses],
                    "sampling_params": [sampling_of(response) for response in responses],
                    "return_logprob": True,
                    **self.address.asked,
                },
            )
        except asyncio.CancelledError:  # nobody wants them any more: the engine would go on for seconds
            self._aborts |= {asyncio.create_task(self._abort(name)) for name in names}
            raise
        return [completion_of(answer) for answer in answers]

    async def _abort(self, name: str) -> None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):  # an engine that is gone samples nothing
            async with self._session.post("/abort_request", json={"rid": name}):
                self._aborts.discard(asyncio.current_task())

    async def check(self, timeout_s: float) -> None:
        """A round trip to the process that schedules the batches, between two of them, whatever it is doing.

        Not SGLang's own /health_generate: that takes a second, draws a token among the responses, and waits for ever
        while the engine is paused.

        Raises:
            EngineLost: no answer in time.
        """
        await self._request("GET", "/server_info", timeout_s, "actor_rollout_ref.rollout.health_check_timeout_s")

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        return await self._request("POST", path, self._timeout_s, self.timeout_key, body)

    async def _request(
        self, method: str, path: str, timeout_s: float, key: str, body: dict[str, Any] | None = None
    ) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                self.address.url,
                headers={"Authorization": f"Bearer {self.address.key}"},
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            )
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self._session.request(method, path, json=body, timeout=timeout) as response:
                if response.status != 200:
                    raise not_ok(self.name, path, response.status, (await response.text())[:500])
                return await response.json()
        except TimeoutError:
            raise EngineLost(self.name, f"{path} gave no answer in {timeout_s:g} s ({key})") from None
        except aiohttp.ClientError as error:
            raise EngineLost(self.name, f"{path} failed: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class EngineControl:
    """Pausing, weight updates and scoring, from the trainer's side."""

    def __init__(self, name: str, address: Address, timeout_s: float, *, index: int = 0, prompt_s: float | None = None):
        """
        Args:
            timeout_s: for a call that does something.
            index: of the engine among all of the job.
            prompt_s: for a call that a healthy engine answers at once; unset: as long as any.
        """
        self.name, self.address, self.index = name, address, index
        self._given_back: set[str] = set()  # while it sleeps
        self._limit = timeout_s, "actor_rollout_ref.weight_sync.timeout_s"
        self._prompt = (prompt_s, "actor_rollout_ref.rollout.health_check_timeout_s") if prompt_s else self._limit
        self._session = requests.Session()
        self._session.trust_env = False  # a cluster's proxy can't reach engines, and ~/.netrc would replace the key
        self._session.headers["Authorization"] = f"Bearer {address.key}"
        self._session.headers["Connection"] = "close"  # calls are far apart: see KEEP_ALIVE_S

    def call(self, path: str, **body: Any) -> dict[str, Any]:
        """POST and return the JSON answer.

        Raises:
            EngineLost: no answer, or the engine failed.
            EngineError: it refused.
        """
        return self._post(path, body, self._limit).json()

    def _post(self, path: str, body: dict[str, Any], limit: tuple[float, str]) -> requests.Response:
        timeout_s, key = limit
        try:
            response = self._session.post(self.address.url + path, json=body, timeout=timeout_s)
        except requests.Timeout:
            raise EngineLost(self.name, f"{path} gave no answer in {timeout_s:g} s ({key})") from None
        except requests.RequestException as error:
            raise EngineLost(self.name, f"{path} failed: {type(error).__name__}") from error
        if response.status_code != 200:
            raise not_ok(self.name, path, response.status_code, response.text[:2000])
        return response

    def flush(self) -> None:
        """Forget cached prefixes; the engine must be idle."""
        self._post("/flush_cache", {}, self._prompt)

    def pause(self) -> None:
        """Sample nothing until ``resume``. Returns when every response in flight was given up, with its tokens so far.

        The other modes of SGLang, "retract" and "in_place", keep them: then the cache of prefixes can't be flushed,
        and tokens drawn afterwards may stand on keys and values of older weights.
        """
        self._post("/pause_generation", {"mode": "abort"}, self._prompt)

    def resume(self) -> None:
        self._post("/continue_generation", {}, self._prompt)

    def sleep(self, parts: Sequence[str]) -> None:
        """Give back the GPU memory of ``parts``, and forget what was in it. The engine must be paused."""
        self._post("/release_memory_occupation", {"tags": list(parts)}, self._limit)
        self._given_back = set(parts)

    def wake(self, parts: Sequence[str]) -> None:
        """Have memory for ``parts`` again, where the engine sleeps; what is in it is anything."""
        if missing := [part for part in parts if part in self._given_back]:
            self._post("/resume_memory_occupation", {"tags": missing}, self._limit)
            self._given_back.difference_update(missing)

    def begin(self, payloads: Sequence[str]) -> None:
        """Weights of a new version follow.

        Args:
            payloads: anything, encoded once per tensor-parallel worker.
        """
        request = {"serialized_named_tensors": list(payloads), "load_format": BEGIN_FORMAT, "flush_cache": False}
        self._post("/update_weights_from_tensor", request, self._prompt)

    def commit(self, manifest_payloads: Sequence[str], version: int) -> float:
        """Make what has arrived the live version, if it is whole; forget cached prefixes of the old one.

        Args:
            manifest_payloads: the manifest, encoded once per tensor-parallel worker.

        Returns:
            Seconds the engine spent on checksums.

        Raises:
            SyncError: something is missing, twice, or different from what was sent.
            EngineLost: it does not answer.
        """
        try:
            answer = self.call(
                "/update_weights_from_tensor",
                serialized_named_tensors=list(manifest_payloads),
                load_format=COMMIT_FORMAT,
                weight_version=str(version),
                flush_cache=True,
            )
        except EngineLost:
            raise
        except EngineError as error:
            raise SyncError(f"{self.name} refused weight version {version}: {error.reason}") from error
        return float(answer["message"].split("verify_s=")[1].split()[0])

    def sample(self, prompt_ids: list[int], num_tokens: int, temperature: float) -> Completion:
        """One response of exactly ``num_tokens``, the same every time for the same weights."""
        answer = self.call(
            "/generate",
            input_ids=prompt_ids,
            sampling_params={
                "max_new_tokens": num_tokens,
                "temperature": temperature,
                "ignore_eos": True,
                "sampling_seed": 0,
            },
            return_logprob=True,
            **self.address.asked,
        )
        return completion_of(answer)
