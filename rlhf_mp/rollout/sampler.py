"""Groups of responses from several engines, each judged as soon as it is complete."""

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Protocol

from rlhf_mp.data.prompts import Prompt
from rlhf_mp.data.types import Trajectory
from rlhf_mp.rewards.base import Response
from rlhf_mp.rewards.weighted import Judged
from rlhf_mp.rollout.base import Completion, RolloutEngine, SamplingParams


class Judge(Protocol):
    """What is used of the run's reward."""

    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> list[Judged]: ...


class Decoder(Protocol):
    """What is used of a tokenizer."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str: ...


def response_seed(run_seed: int, step: int, group: int, response: int) -> int:
    """63 bits from where a response stands in the run: a resumed run draws the same ones."""
    key = f"{run_seed}/{step}/{group}/{response}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


class Sampler:
    """Sends each group to the engine with the fewest responses in flight."""

    def __init__(self, decoder: Decoder, reward: Judge):
        self._decoder, self._reward = decoder, reward
        self.connect([])

    def connect(self, engines: Sequence[RolloutEngine]) -> None:
        self.engines = list(engines)
        self._in_flight = [0] * len(self.engines)

    async def group(
        self, prompt: Prompt, params: SamplingParams, seeds: Sequence[int | None], group_id: int
    ) -> list[Trajectory]:
        """One response per seed, with rewards."""
        completions = await self._generate(prompt.ids, params, seeds)
        judged = await self._reward.score(prompt, [Response(self.text(c.ids), len(c.ids)) for c in completions])
        return [
            Trajectory(
                prompt_ids=prompt.ids,
                response_ids=c.ids,
                response_logprobs=c.logprobs,
                loss_mask=[True] * len(c.ids),
                reward=worth.reward,
                group_id=group_id,
                version=c.version,
                finish_reason=c.finish_reason,
                scores=worth.scores,
                source=prompt.source,
            )
            for c, worth in zip(completions, judged, strict=True)
        ]

    async def groups(
        self, prompts: Sequence[Prompt], params: SamplingParams, seeds: Sequence[Sequence[int | None]]
    ) -> list[list[Trajectory]]:
        """All groups at once; group ids are positions. The first failure cancels the rest."""
        try:
            async with asyncio.TaskGroup() as tasks:
                jobs = [
                    tasks.create_task(self.group(prompt, params, own, group_id))
                    for group_id, (prompt, own) in enumerate(zip(prompts, seeds, strict=True))
                ]
        except ExceptionGroup as failures:  # callers know an EngineError, not a group of them
            raise failures.exceptions[0] from None
        return [job.result() for job in jobs]

    async def _generate(self, ids: list[int], params: SamplingParams, seeds: Sequence[int | None]) -> list[Completion]:
        index = min(range(len(self.engines)), key=self._in_flight.__getitem__)
        self._in_flight[index] += len(seeds)
        try:
            return await self.engines[index].generate(ids, params, seeds)
        finally:
            self._in_flight[index] -= len(seeds)

    def text(self, ids: list[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=True)
