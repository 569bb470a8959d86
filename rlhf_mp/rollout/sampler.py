"""Groups of responses from several engines, each judged as soon as it is complete."""

import asyncio
import hashlib
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from rlhf_mp.data.prompts import Prompt
from rlhf_mp.data.types import Trajectory
from rlhf_mp.rewards.base import Response
from rlhf_mp.rewards.weighted import Worth
from rlhf_mp.rollout.base import RolloutEngine, SamplingParams
from rlhf_mp.rollout.episodes import Episode, Episodes

T = TypeVar("T")


class Judge(Protocol):
    """What is used of the run's reward."""

    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> list[Worth]: ...


class Decoder(Protocol):
    """What is used of a tokenizer."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str: ...


def response_seed(run_seed: int, step: int, group: int, response: int) -> int:
    """63 bits from where a response stands in the run: a resumed run draws the same ones."""
    key = f"{run_seed}/{step}/{group}/{response}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


class Sampler:
    """Sends each group to the engine with the fewest responses in flight; all turns of an episode to the same.

    Args:
        episodes: how responses of several turns come about; None: every response is one turn.
    """

    def __init__(self, decoder: Decoder, reward: Judge, episodes: Episodes | None = None):
        self._decoder, self._reward, self._episodes = decoder, reward, episodes
        self.connect([])

    def connect(self, engines: Sequence[RolloutEngine]) -> None:
        self.engines = list(engines)
        self._in_flight = [0] * len(self.engines)

    async def group(
        self, prompt: Prompt, params: SamplingParams, seeds: Sequence[int | None], group_id: int
    ) -> list[Trajectory]:
        """One response per seed, with rewards."""
        with self._least_loaded(len(seeds)) as engine:
            responses = await self._sampled(engine, prompt, params, seeds)
        judged = await self._reward.score(
            prompt, [Response(self.text(r.last_turn), sum(r.mask), r.paid, r.failure) for r in responses]
        )
        return [
            Trajectory(
                prompt_ids=prompt.ids,
                response_ids=r.ids,
                response_logprobs=r.logprobs,
                loss_mask=r.mask,
                reward=worth.reward,
                group_id=group_id,
                version=r.version,
                finish_reason=r.finish_reason,
                scores=worth.scores,
                source=prompt.source,
                num_turns=r.num_turns,
            )
            for r, worth in zip(responses, judged, strict=True)
        ]

    async def groups(
        self, prompts: Sequence[Prompt], params: SamplingParams, seeds: Sequence[Sequence[int | None]]
    ) -> list[list[Trajectory]]:
        """All groups at once; group ids are positions. The first failure cancels the rest."""
        return await together(
            self.group(prompt, params, own, group_id)
            for group_id, (prompt, own) in enumerate(zip(prompts, seeds, strict=True))
        )

    async def _sampled(
        self, engine: RolloutEngine, prompt: Prompt, params: SamplingParams, seeds: Sequence[int | None]
    ) -> list[Episode]:
        if self._episodes is not None:
            play = self._episodes.play
            return await together(play(prompt, params, seed, engine.generate) for seed in seeds)
        episodes = [Episode() for _ in seeds]
        for episode, completion in zip(episodes, await engine.generate(prompt.ids, params, seeds), strict=True):
            episode.say(completion)
        return episodes

    @contextmanager
    def _least_loaded(self, num_responses: int) -> Iterator[RolloutEngine]:
        index = min(range(len(self.engines)), key=self._in_flight.__getitem__)
        self._in_flight[index] += num_responses
        try:
            yield self.engines[index]
        finally:
            self._in_flight[index] -= num_responses

    def text(self, ids: list[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=True)


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all calls, in order. The first failure cancels the rest, and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as tasks:
            jobs = [tasks.create_task(call) for call in calls]
    except ExceptionGroup as failures:  # callers know an EngineError, not a group of them
        raise failures.exceptions[0] from None
    return [job.result() for job in jobs]
