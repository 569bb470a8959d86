"""Talking to an SGLang server: ``SGLangClient`` samples (asyncio), ``EngineControl`` changes its state (blocking)."""

from collections.abc import Sequence
from typing import Any

import aiohttp
import requests

from rlhf_mp.errors import EngineError, SyncError
from rlhf_mp.rollout.base import Completion, SamplingParams
from rlhf_mp.rollout.sglang_plugin import BEGIN_FORMAT, COMMIT_FORMAT
from rlhf_mp.rollout.sglang_server import Address

KEEP_ALIVE_S = 2.0
"""The server closes connections that were idle for 5 s. One used in that moment fails, so ours are given up before."""


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


class SGLangClient:
    """A RolloutEngine. Use it from one event loop."""

    def __init__(self, name: str, address: Address, timeout_s: float):
        self.name, self.address = name, address
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def generate(
        self, prompt_ids: list[int], params: SamplingParams, seeds: Sequence[int | None]
    ) -> list[Completion]:
        shared = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "max_new_tokens": params.max_new_tokens,
            "stop_token_ids": list(params.stop_token_ids),
        }
        answers = await self._post(
            "/generate",
            {
                "input_ids": [prompt_ids] * len(seeds),
                "sampling_params": [shared if seed is None else shared | {"sampling_seed": seed} for seed in seeds],
                "return_logprob": True,
            },
        )
        return [completion_of(answer) for answer in answers]

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                self.address.url,
                headers={"Authorization": f"Bearer {self.address.key}"},
                timeout=self._timeout,
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            )
        try:
            async with self._session.post(path, json=body) as response:
                if response.status != 200:
                    raise EngineError(self.name, f"{path} answered {response.status}: {(await response.text())[:500]}")
                return await response.json()
        except TimeoutError:
            key = "actor_rollout_ref.rollout.request_timeout_s"
            raise EngineError(self.name, f"{path} gave no answer in {self._timeout.total:g} s ({key})") from None
        except aiohttp.ClientError as error:
            raise EngineError(self.name, f"{path} failed: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class EngineControl:
    """Pausing, weight updates and scoring, from the trainer's side."""

    def __init__(self, name: str, address: Address, timeout_s: float):
        self.name, self.address, self._timeout_s = name, address, timeout_s
        self._session = requests.Session()
        self._session.trust_env = False  # a cluster's proxy can't reach engines, and ~/.netrc would replace the key
        self._session.headers["Authorization"] = f"Bearer {address.key}"
        self._session.headers["Connection"] = "close"  # calls are far apart: see KEEP_ALIVE_S

    def call(self, path: str, **body: Any) -> dict[str, Any]:
        """POST and return the JSON answer.

        Raises:
            EngineError: no answer, or not 200.
        """
        return self._post(path, body).json()

    def _post(self, path: str, body: dict[str, Any]) -> requests.Response:
        try:
            response = self._session.post(self.address.url + path, json=body, timeout=self._timeout_s)
        except requests.Timeout:
            key = "actor_rollout_ref.weight_sync.timeout_s"
            raise EngineError(self.name, f"{path} gave no answer in {self._timeout_s:g} s ({key})") from None
        except requests.RequestException as error:
            raise EngineError(self.name, f"{path} failed: {type(error).__name__}") from error
        if response.status_code != 200:
            raise EngineError(self.name, f"{path} answered {response.status_code}: {response.text[:2000]}")
        return response

    def flush(self) -> None:
        """Forget cached prefixes; the engine must be idle."""
        self._post("/flush_cache", {})

    def pause(self, mode: str = "retract") -> None:
        self.call("/pause_generation", mode=mode)

    def resume(self) -> None:
        self.call("/continue_generation")

    def begin(self, payloads: Sequence[str]) -> None:
        """Weights of a new version follow.

        Args:
            payloads: anything, encoded once per tensor-parallel worker.
        """
        self.call(
            "/update_weights_from_tensor",
            serialized_named_tensors=list(payloads),
            load_format=BEGIN_FORMAT,
            flush_cache=False,
        )

    def commit(self, manifest_payloads: Sequence[str], version: int) -> float:
        """Make what has arrived the live version, if it is whole; forget cached prefixes of the old one.

        Args:
            manifest_payloads: the manifest, encoded once per tensor-parallel worker.

        Returns:
            Seconds the engine spent on checksums.

        Raises:
            SyncError: something is missing, twice, or different from what was sent.
        """
        try:
            answer = self.call(
                "/update_weights_from_tensor",
                serialized_named_tensors=list(manifest_payloads),
                load_format=COMMIT_FORMAT,
                weight_version=str(version),
                flush_cache=True,
            )
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
        )
        return completion_of(answer)
