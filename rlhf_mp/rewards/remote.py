"""Scores from a service of your own.

``POST url {"items": [{"prompt", "response", "answer", "source"}, ...]}`` is answered by ``{"scores": [number, ...]}``,
one per item; null is a response that the service could not judge.
"""

import asyncio
from collections.abc import Sequence

from rlhf_mp.config.reward import RemoteTerm
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.rewards.base import Failure, Response, Setting, rewards
from rlhf_mp.rewards.endpoint import Endpoint, EndpointError, check_key

Item = tuple[dict[str, str], asyncio.Future]


@rewards.register("remote")
class RemoteReward:
    """Batches of whatever comes in together, from all groups."""

    def __init__(self, term: RemoteTerm, setting: Setting):
        self.term, self._startup_timeout_s = term, setting.startup_timeout_s
        self._endpoint = Endpoint(
            term.url,
            api_key_env=term.api_key_env,
            timeout_s=term.timeout_s,
            max_concurrency=term.max_concurrency,
        )
        self._waiting: list[Item] = []
        self._timer: asyncio.TimerHandle | None = None
        self._sending: set[asyncio.Task] = set()

    async def start(self) -> str:
        check_key(self.term.api_key_env)
        await self._endpoint.wait_up(self._startup_timeout_s)
        return f"{self.term.url}, batches of {self.term.batch_size}"

    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> Sequence[float | Failure]:
        loop = asyncio.get_running_loop()
        mine = []
        for response in responses:
            item = {"prompt": prompt.text, "response": response.text, "answer": prompt.answer, "source": prompt.source}
            mine.append(loop.create_future())
            self._waiting.append((item, mine[-1]))
        while len(self._waiting) >= self.term.batch_size:
            self._send(self.term.batch_size)
        if self._waiting and self._timer is None:
            self._timer = loop.call_later(self.term.batch_wait_s, self._send_rest)
        return await asyncio.gather(*mine)

    async def close(self) -> None:
        for task in self._sending:
            task.cancel()
        await self._endpoint.close()

    def _send_rest(self) -> None:
        self._timer = None
        if self._waiting:
            self._send(len(self._waiting))

    def _send(self, number: int) -> None:
        batch, self._waiting = self._waiting[:number], self._waiting[number:]
        task = asyncio.create_task(self._judge(batch))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _judge(self, batch: list[Item]) -> None:
        try:
            scores = await self._scores([item for item, _ in batch])
        except Exception as error:  # whoever waits must hear of it
            scores = [Failure("error", f"{type(error).__name__}: {error}")] * len(batch)
        for (_, future), score in zip(batch, scores, strict=True):
            if not future.done():  # whoever asked may have been cancelled
                future.set_result(score)

    async def _scores(self, items: list[dict[str, str]]) -> Sequence[float | Failure]:
        try:
            answer = await self._endpoint.post("", {"items": items})
        except EndpointError as error:
            return [Failure(error.kind, str(error))] * len(items)
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(scores, list):
            return [Failure("garbage", f"no list of scores: {str(answer)[:200]}")] * len(items)
        if len(scores) != len(items):
            return [Failure("count", f"{len(scores)} scores for {len(items)} responses")] * len(items)
        return [Failure("garbage", "the service could not judge it") if score is None else score for score in scores]
