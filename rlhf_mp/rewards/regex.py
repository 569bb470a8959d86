"""1 where a pattern is found. In a worker, because a pattern can take for ever on a text made for it."""

import asyncio
import re
from collections.abc import Callable, Sequence

from rlhf_mp.config.reward import RegexTerm
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.rewards.base import Failure, Response, Setting, rewards
from rlhf_mp.rewards.worker import WorkerDied, WorkerPool, WorkFailed

MEMORY_MB = 1024


@rewards.register("regex")
class RegexReward:
    """Searches the whole response."""

    def __init__(self, term: RegexTerm, setting: Setting):
        self._pool = WorkerPool(search, (term.pattern,), size=1, timeout_s=term.timeout_s, memory_mb=MEMORY_MB)

    async def start(self) -> str:
        await self._pool.start("regex")
        return ""

    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> Sequence[float | Failure]:
        return await asyncio.gather(*(self._score(prompt.answer, response.text) for response in responses))

    async def _score(self, answer: str, text: str) -> float | Failure:
        try:
            return float(await self._pool.call(answer, text))
        except WorkerDied as death:
            return Failure(death.kind, str(death))
        except WorkFailed as error:
            return Failure("error", str(error))

    async def close(self) -> None:
        await asyncio.to_thread(self._pool.close)


def search(pattern: str) -> Callable[[str, str], bool]:
    """In the worker: whether ``pattern``, with the reference answer put in, is found in a text."""

    def found(answer: str, text: str) -> bool:
        return re.search(pattern.replace("{answer}", re.escape(answer)), text) is not None

    return found
