"""Your own function, given as ``package.module:function``.

It judges a group: ``score(responses, *, prompt, answer, source, **args) -> list of numbers``, plain or async, where
``responses`` is a list of texts and the rest are texts too. It runs in processes of its own, so it may block, crash or
hang without holding up the run; it is your code, so it may read files and use the network.
"""

import asyncio
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rlhf_mp.config.reward import FunctionTerm
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.rewards.base import Failure, Response, Setting
from rlhf_mp.rewards.worker import WorkerDied, WorkerPool, WorkFailed


class FunctionReward:
    """A group is one call; if it fails, it fails for the whole group."""

    def __init__(self, term: FunctionTerm, setting: Setting):
        self.term = term
        self._pool = WorkerPool(
            load, (term.name, term.args, sys.path),
            size=term.num_workers, timeout_s=term.timeout_s, memory_mb=term.memory_mb,
        )  # fmt: skip

    async def start(self) -> str:
        await self._pool.start(self.term.name)
        return f"{self.term.name} runs in {self.term.num_workers} process(es) of {self.term.memory_mb} MB"

    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> Sequence[float | Failure]:
        texts = [response.text for response in responses]
        try:
            return await self._pool.call(texts, prompt.text, prompt.answer, prompt.source)
        except WorkerDied as death:
            return [Failure(death.kind, str(death))] * len(responses)
        except WorkFailed as error:
            return [Failure("error", str(error))] * len(responses)

    async def close(self) -> None:
        await asyncio.to_thread(self._pool.close)


def load(name: str, args: dict[str, Any], path: list[str]) -> Callable[[list[str], str, str, str], list[Any]]:
    """In the worker: the function, ready for a group."""
    sys.path[:] = path
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)

    def score(responses: list[str], prompt: str, answer: str, source: str) -> list[Any]:
        found = function(responses, prompt=prompt, answer=answer, source=source, **args)
        return [plain(x) for x in (asyncio.run(found) if inspect.iscoroutine(found) else found)]

    return score


def plain(score: Any) -> Any:
    """NumPy's and torch's numbers as Python's; anything else as what it is, to be refused by name."""
    return score.item() if hasattr(score, "item") else score if isinstance(score, int | float) else repr(score)[:100]
