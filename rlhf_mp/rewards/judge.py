"""A language model as judge, behind any OpenAI-compatible endpoint; an SGLang server is one."""

import asyncio
import math
import re
from collections.abc import Sequence
from typing import Any

from rlhf_mp.config.reward import JudgeTerm
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.errors import RewardError
from rlhf_mp.rewards.base import Failure, Response, Setting, rewards
from rlhf_mp.rewards.endpoint import Endpoint, EndpointError, check_key


@rewards.register("judge")
class JudgeReward:
    """Mean of the votes that hold a score; a response without any is a failure."""

    def __init__(self, term: JudgeTerm, setting: Setting):
        self.term, self._startup_timeout_s = term, setting.startup_timeout_s
        self._pattern = re.compile(term.score_pattern)
        self._endpoint = Endpoint(
            term.base_url.rstrip("/"),
            api_key_env=term.api_key_env,
            timeout_s=term.timeout_s,
            max_concurrency=term.max_concurrency,
        )

    async def start(self) -> str:
        check_key(self.term.api_key_env)
        await self._endpoint.wait_up(self._startup_timeout_s)
        try:
            await self._endpoint.post("/chat/completions", self._body("Say nothing.") | {"max_tokens": 1})
        except EndpointError as error:
            raise RewardError(f"judge {self.term.model}: {error}") from error
        return f"{self.term.model} at {self.term.base_url}, {self.term.votes} vote(s)"

    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> Sequence[float | Failure]:
        return await asyncio.gather(*(self._score(prompt, response.text) for response in responses))

    async def close(self) -> None:
        await self._endpoint.close()

    async def _score(self, prompt: Prompt, response: str) -> float | Failure:
        text = self.term.template.format(question=prompt.text, answer=prompt.answer, response=response)
        votes = await asyncio.gather(*(self._vote(text) for _ in range(self.term.votes)))
        counted = [vote for vote in votes if isinstance(vote, float)]
        return math.fsum(counted) / len(counted) if counted else votes[0]

    async def _vote(self, text: str) -> float | Failure:
        try:
            answer = await self._endpoint.post("/chat/completions", self._body(text))
        except EndpointError as error:
            return Failure(error.kind, str(error))
        try:
            said = answer["choices"][0]["message"]["content"]
            found = [*self._pattern.finditer(said)]
        except (KeyError, IndexError, TypeError):
            return Failure("garbage", f"no chat completion: {str(answer)[:200]}")
        if not found:
            return Failure("garbage", f"no score in {said[-200:]!r}")
        try:
            score = float(found[-1][1])
        except (TypeError, ValueError):  # the group took no part in the match, or holds no number
            return Failure("garbage", f"no number in {found[-1][0]!r}")
        if not 0 <= score <= self.term.max_score:
            return Failure("garbage", f"score {score:g} is outside 0 to {self.term.max_score:g}")
        return score / self.term.max_score

    def _body(self, text: str) -> dict[str, Any]:
        return {
            "model": self.term.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": self.term.temperature,
            "max_tokens": self.term.max_tokens,
        }
