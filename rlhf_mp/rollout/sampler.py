"""Groups of responses from several engines, each judged as soon as it is complete."""

import asyncio
import hashlib
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from rlhf_mp.data.prompts import Prompt
from rlhf_mp.data.types import Sums, Trajectory
from rlhf_mp.rewards.base import Response
from rlhf_mp.rewards.weighted import Worth
from rlhf_mp.rollout.base import Engines, FixedEngines, RewardServers, RolloutEngine, SamplingParams
from rlhf_mp.rollout.episodes import Episode, Episodes
from rlhf_mp.rollout.stragglers import first_complete

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
    """Sends each group to one engine, with all turns of its episodes.

    Args:
        episodes: how responses of several turns come about; None: every response is one turn.
    """

    def __init__(self, decoder: Decoder, reward: Judge, episodes: Episodes | None = None):
        self._decoder, self._reward, self._episodes = decoder, reward, episodes
        self.engines: Engines = FixedEngines([])
        self.reward_servers: RewardServers | None = None  # None: nobody scores while sampling goes on

    def connect(self, engines: Engines, reward_servers: RewardServers | None = None) -> None:
        self.engines, self.reward_servers = engines, reward_servers

    def metrics(self) -> Sums:
        """What happened to the servers since this was asked last."""
        scoring = self.reward_servers.metrics() if self.reward_servers else {}
        return self.engines.metrics() | scoring

    async def group(
        self, prompt: Prompt, params: SamplingParams, seeds: Sequence[int | None], group_id: int
    ) -> list[Trajectory]:
        """One response per seed, with rewards."""
        responses = await self.engines.run(len(seeds), lambda engine: self._sampled(engine, prompt, params, seeds))
        judged, rm_scores = await asyncio.gather(
            self._reward.score(
                prompt, [Response(self.text(r.last_turn), sum(r.mask), r.paid, r.failure) for r in responses]
            ),
            self._rm_scores(prompt, responses),
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
                token_versions=r.versions,
                payments=[(token, worth.paid_weight * amount) for token, amount in r.payments],
                rm_score=rm_score,
            )
            for r, worth, rm_score in zip(responses, judged, rm_scores, strict=True)
        ]

    async def _rm_scores(self, prompt: Prompt, responses: Sequence[Episode]) -> list[float] | list[None]:
        """Equal responses are scored once: in another batch rounding would make a difference between them."""
        if self.reward_servers is None:
            return [None] * len(responses)
        whole = [(*prompt.ids, *r.ids) for r in responses]
        different = [*dict.fromkeys(whole)]
        found = await self.reward_servers.run(len(different), lambda server: server.score(different))
        score_of = dict(zip(different, found, strict=True))
        return [score_of[sequence] for sequence in whole]

    async def groups(
        self, prompts: Sequence[Prompt], params: SamplingParams, seeds: Sequence[Sequence[int | None]]
    ) -> list[list[Trajectory]]:
        """All groups at once; group ids are positions. The first failure cancels the rest."""
        return await together(
            self.group(prompt, params, own, group_id)
            for group_id, (prompt, own) in enumerate(zip(prompts, seeds, strict=True))
        )

    async def first_groups(
        self, prompts: Sequence[Prompt], params: SamplingParams, seeds: Sequence[Sequence[int | None]], num: int
    ) -> dict[int, list[Trajectory]]:
        """The ``num`` groups that are complete first, by their positions; the others are aborted."""
        return await first_complete(
            (
                self.group(prompt, params, own, group_id)
                for group_id, (prompt, own) in enumerate(zip(prompts, seeds, strict=True))
            ),
            num,
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
