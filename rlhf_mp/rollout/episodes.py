"""Episodes: the policy and an environment take turns, thousands of episodes beside each other."""

import asyncio
import inspect
import math
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlhf_mp.config.multi_turn import MultiTurnConfig
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.data.types import FinishReason, Sums, Trajectory
from rlhf_mp.environments.base import Environment, Turn
from rlhf_mp.rewards.base import Failure
from rlhf_mp.rollout.base import Completion, SamplingParams
from rlhf_mp.rollout.turns import TurnEncoder

Generate = Callable[[list[int], SamplingParams, Sequence[int | None]], Awaitable[list[Completion]]]


@dataclass
class Episode:
    """What was said so far; the per-token lists have one entry per token after the prompt."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)  # False: the environment's
    finish_reason: FinishReason = "stop"
    version: int = -1  # the oldest that sampled a turn
    versions: list[int] = field(default_factory=list)  # of each token; the environment's have that of the turn before
    num_turns: int = 0
    last_turn: list[int] = field(default_factory=list)
    payments: list[tuple[int, float]] = field(default_factory=list)  # which token ended the turn, and what it earned
    failure: Failure | None = None

    @property
    def paid(self) -> float:
        return sum(amount for _, amount in self.payments)

    def read(self, ids: list[int]) -> None:
        """Tokens that the policy did not choose."""
        self.ids += ids
        self.logprobs += [0.0] * len(ids)
        self.mask += [False] * len(ids)
        self.versions += [self.versions[-1] if self.versions else self.version] * len(ids)

    def say(self, turn: Completion) -> None:
        """Tokens that the policy chose, exactly as sampled."""
        self.ids += turn.ids
        self.logprobs += turn.logprobs
        self.mask += [True] * len(turn.ids)
        self.versions += turn.token_versions
        self.last_turn = turn.ids
        self.version = turn.version if self.num_turns == 0 else min(self.version, turn.version)
        self.num_turns += 1
        self.finish_reason = turn.finish_reason


class Episodes:
    """Plays episodes within the limits of ``rollout.multi_turn``.

    An episode ends when the environment says so, when a limit on tokens, turns or time is reached, or when the
    environment raises or does not answer in time. It always ends with a turn of the policy: what nobody answers to
    is not written down.
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        knobs: MultiTurnConfig,
        encoder: TurnEncoder,
        text: Callable[[list[int]], str],
    ):
        self._make, self._knobs, self._encoder, self._text = make, knobs, encoder, text

    async def play(self, prompt: Prompt, params: SamplingParams, seed: int | None, generate: Generate) -> Episode:
        """One episode; ``params.max_new_tokens`` is for all of its turns and observations together."""
        episode, environment = Episode(), self._make()
        deadline = time.monotonic() + self._knobs.episode_timeout_s
        opening = await self._ask(episode, environment.reset, prompt)
        following = [] if episode.failure else self._opened(episode, opening)
        while episode.failure is None:
            left = params.max_new_tokens - len(episode.ids) - len(following)
            if left < 1:
                episode.finish_reason = "length"
                break
            if episode.num_turns and self._ends(episode, deadline):
                break
            episode.read(following)
            limit = min(left, self._knobs.max_tokens_per_turn or left)
            own = replace(params, max_new_tokens=limit)
            (completion,) = await generate([*prompt.ids, *episode.ids], own, [seed])
            episode.say(completion)
            if completion.finish_reason == "abort":
                break
            turn = await self._ask(episode, environment.step, self._text(completion.ids))
            if not settled(episode, turn):
                break
            following = self._encoder.between(completion.ids, turn.observation)
        return episode

    def _opened(self, episode: Episode, opening: Any) -> list[int]:
        if not isinstance(opening, str):
            fail(episode, "invalid", f"reset returned {type(opening).__name__} instead of a text")
        elif opening and self._encoder.chat:
            fail(episode, "invalid", "reset returned a text, but a chat's prompt already ends where an answer begins")
        else:
            return self._encoder.opening(opening)
        return []

    def _ends(self, episode: Episode, deadline: float) -> bool:
        """Whether a limit on turns or time is reached."""
        if episode.num_turns >= self._knobs.max_assistant_turns:
            episode.finish_reason = "turns"
        elif time.monotonic() > deadline:
            episode.finish_reason = "time"
        else:
            return False
        return True

    async def _ask(self, episode: Episode, method: Callable[..., Any], argument: Any) -> Any:
        """What the environment answers, or None with the failure noted."""
        timeout_s = self._knobs.tool_timeout_s
        try:
            return await bounded(method, argument, timeout_s)
        except NoAnswer:
            fail(episode, "timeout", f"{method.__qualname__} gave no answer in {timeout_s:g} s", "time")
        except Exception as error:  # the environment's own mistake: documented in docs/episodes.md
            fail(episode, "error", f"{method.__qualname__}: {type(error).__name__}: {error}"[:500])
        return None


class NoAnswer(Exception):
    """Nothing came back in time."""


def fail(episode: Episode, kind: str, reason: str, finish_reason: FinishReason = "error") -> None:
    episode.failure, episode.finish_reason = Failure(kind, reason), finish_reason


def settled(episode: Episode, turn: Any) -> bool:
    """Take in an environment's answer; whether the episode goes on."""
    if episode.failure is not None:
        return False
    if not isinstance(turn, Turn) or not isinstance(turn.observation, str):
        fail(episode, "invalid", f"step returned {turn!r:.100} instead of a Turn with a text")
        return False
    if not isinstance(turn.reward, int | float) or not math.isfinite(turn.reward):
        fail(episode, "invalid", f"step paid {turn.reward!r:.100} instead of a finite number")
        return False
    episode.payments.append((len(episode.ids) - 1, turn.reward))
    if turn.done:
        episode.finish_reason = "stop"
    return not turn.done


async def bounded(method: Callable[..., Any], argument: Any, timeout_s: float) -> Any:
    """Call a method, on the loop if it is async, else in a thread of its own, and wait no longer than ``timeout_s``.

    What hangs is left behind: a thread can't be ended, but as a daemon it holds up nothing, and as one of its own it
    takes no worker from a pool. A coroutine that will not be cancelled is left behind too.
    """
    if inspect.iscoroutinefunction(method):
        task: asyncio.Future = asyncio.ensure_future(method(argument))
    else:
        task = in_thread(method, argument)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        task.cancel()
        raise NoAnswer
    return task.result()


def in_thread(method: Callable[..., Any], argument: Any) -> asyncio.Future:
    """A daemon thread's result as a future."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future = loop.create_future()

    def deliver(result: Any, error: BaseException | None) -> None:
        if future.done():  # nobody waits any more
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = method(argument)
        except Exception as raised:
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=work, name="environment", daemon=True).start()
    return future


def episode_metrics(episodes: Sequence[Trajectory]) -> Sums:
    """What only episodes have."""
    count = len(episodes)
    tokens = sum(len(t.response_ids) for t in episodes)
    ends = {reason: sum(t.finish_reason == reason for t in episodes) for reason in ("turns", "time", "error")}
    return {
        "rollout/turns_mean": (sum(t.num_turns for t in episodes), count),
        "rollout/turns_max": (max(t.num_turns for t in episodes), 1),
        "rollout/observation_fraction": (tokens - sum(sum(t.loss_mask) for t in episodes), tokens),
        **{f"rollout/ended_by_{reason}_fraction": (number, count) for reason, number in ends.items()},
    }
