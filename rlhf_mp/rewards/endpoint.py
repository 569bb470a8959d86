"""JSON over HTTP to a service that may be slow, busy or gone: retries within one deadline, never longer."""

import asyncio
import os
import random
import time
from typing import Any

import aiohttp

from rlhf_mp.errors import RewardError

BUSY = {408, 425, 429, 500, 502, 503, 504, 529}  # worth asking again
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 10.0
KEEP_ALIVE_S = 2.0  # servers close idle connections after about 5 s, and one used in that moment fails


class EndpointError(RuntimeError):
    """No usable answer before the deadline."""

    def __init__(self, kind: str, reason: str):
        self.kind = kind  # timeout, unavailable, busy, error
        super().__init__(reason)


class Endpoint:
    """One service. Use it from one event loop.

    Args:
        timeout_s: for one call from its turn on, all retries included.
        max_concurrency: calls at once. After as many calls without an answer in a row the rest of a step must not
            wait for their deadlines too: nothing is tried again until something answers.
    """

    def __init__(self, url: str, *, api_key_env: str, timeout_s: float, max_concurrency: int):
        self.url, self._timeout_s, self._api_key_env = url, timeout_s, api_key_env
        self._turns, self._patience = asyncio.Semaphore(max_concurrency), max_concurrency
        self._unanswered = 0  # calls in a row
        self._session: aiohttp.ClientSession | None = None
        self.num_retries = 0

    async def wait_up(self, timeout_s: float) -> None:
        """Return when something answers HTTP there, whatever it says.

        Raises:
            RewardError: nothing did.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                async with self._connected().get(self.url, timeout=aiohttp.ClientTimeout(total=5)):
                    return
            except (aiohttp.ClientError, TimeoutError) as error:
                if time.monotonic() > deadline:
                    reason = f"nothing answers at {self.url}: {type(error).__name__}: {error}"
                    raise RewardError(f"{reason} (reward.startup_timeout_s = {timeout_s:g})") from error
            await asyncio.sleep(min(0.5, timeout_s / 4))

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer.

        Raises:
            EndpointError: with the reason of the last attempt.
        """
        last = EndpointError("timeout", f"{self.url}{path}: no answer in {self._timeout_s:g} s")
        wait_s = FIRST_WAIT_S
        async with self._turns:
            try:
                async with asyncio.timeout(self._timeout_s):
                    while True:
                        try:
                            answer = await self._once(path, body)
                            self._unanswered = 0
                            return answer
                        except Retry as retry:
                            last = retry.error
                            if self._unanswered >= self._patience:
                                raise TimeoutError from retry
                            self.num_retries += 1
                            await asyncio.sleep(retry.after_s or wait_s * random.uniform(0.5, 1.5))
                            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            except TimeoutError:
                self._unanswered += 1
                raise last from None

    async def _once(self, path: str, body: dict[str, Any]) -> Any:
        try:
            async with self._connected().post(f"{self.url}{path}", json=body) as response:
                if response.status == 200:
                    return await response.json(content_type=None)
                reason = f"{self.url}{path} answered {response.status}: {(await response.text())[:200]}"
                if response.status in BUSY:
                    raise Retry(EndpointError("busy", reason), seconds(response.headers.get("Retry-After")))
                raise EndpointError("error", reason)
        except aiohttp.ClientError as error:
            raise Retry(EndpointError("unavailable", f"{self.url}{path}: {type(error).__name__}: {error}")) from error
        except ValueError as error:
            raise EndpointError("garbage", f"{self.url}{path} answered no JSON: {error}"[:200]) from error

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            key = os.environ.get(self._api_key_env, "") if self._api_key_env else ""
            self._session = aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=aiohttp.ClientTimeout(total=None),
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class Retry(Exception):
    """An attempt that another may follow."""

    def __init__(self, error: EndpointError, after_s: float | None = None):
        self.error, self.after_s = error, after_s
        super().__init__(str(error))


def seconds(header: str | None) -> float | None:
    """Of a Retry-After header; None where it is missing or a date."""
    try:
        return max(0.0, float(header)) if header is not None else None
    except ValueError:
        return None


def check_key(api_key_env: str) -> None:
    """Raise RewardError when the variable that should hold the key is not set."""
    if api_key_env and not os.environ.get(api_key_env):
        raise RewardError(f"api_key_env names {api_key_env}, which is not set in the environment")
