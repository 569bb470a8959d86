"""Bookkeeping, limits and faults of episodes, on an engine whose tokens are known."""

import asyncio
import time

import pytest

from rlhf_mp.config.multi_turn import MultiTurnConfig
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.data.types import Trajectory
from rlhf_mp.environments.base import Turn
from rlhf_mp.rollout.base import Completion, SamplingParams
from rlhf_mp.rollout.episodes import Episode, Episodes, episode_metrics

PROMPT = Prompt(3, [1, 2], "question", "truth")
STOP = 9


class Encoder:
    """An observation of n letters is n times the token 50."""

    chat = False

    def between(self, sampled, observation):
        return [50] * len(observation)

    def opening(self, observation):
        return [60] * len(observation)


class Scripted:
    """Answers with these turns, one after the other."""

    def __init__(self, *turns, opening=""):
        self.turns, self.opening, self.heard = list(turns), opening, []

    async def reset(self, prompt):
        assert prompt is PROMPT
        return self.opening

    async def step(self, response):
        self.heard.append(response)
        turn = self.turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        return turn


class Engine:
    """Says 10, 11, ... and the stop token, or as much of it as it may; remembers what it read."""

    def __init__(self, length=3):
        self.length, self.read = length, []

    async def generate(self, ids, params, seeds):
        self.read.append((list(ids), params.max_new_tokens, list(seeds)))
        await asyncio.sleep(0)
        said = [*range(10, 10 + self.length - 1), STOP][: params.max_new_tokens]
        reason = "stop" if said[-1] == STOP else "length"
        return [Completion(said, [-0.1 * token for token in said], reason, 7 - len(self.read))]


def play(environment, engine, *, max_new_tokens=100, **knobs):
    episodes = Episodes(lambda: environment, MultiTurnConfig(enable=True, **knobs), Encoder(), lambda ids: str(ids))
    params = SamplingParams(1.0, 1.0, -1, max_new_tokens, (STOP,))
    return asyncio.run(episodes.play(PROMPT, params, 42, engine.generate))


def test_what_the_policy_said_is_kept_as_sampled_and_what_it_read_is_masked():
    environment = Scripted(Turn("ab", 0.25), Turn("c", 0.5), Turn(reward=1.0, done=True), opening="o")
    engine = Engine(length=3)
    episode = play(environment, engine)
    turn = [10, 11, STOP]
    assert episode.ids == [60, *turn, 50, 50, *turn, 50, *turn]
    assert episode.mask == [False] + [True] * 3 + [False] * 2 + [True] * 3 + [False] + [True] * 3
    logprobs = [-1.0, -1.1, -0.9]
    assert episode.logprobs == pytest.approx([0, *logprobs, 0, 0, *logprobs, 0, *logprobs])
    assert (episode.paid, episode.num_turns, episode.finish_reason) == (1.75, 3, "stop")
    assert episode.payments == [(3, 0.25), (8, 0.5), (12, 1.0)]  # the last token of each turn
    assert episode.last_turn == turn and episode.version == 4  # turns came from versions 6, 5, 4
    assert environment.heard == [str(turn)] * 3
    # every turn continues exactly what came before, from the same seed and with what is left of the budget
    assert [ids for ids, _, _ in engine.read] == [[1, 2, *episode.ids[:n]] for n in (1, 6, 10)]
    assert [(budget, seeds) for _, budget, seeds in engine.read] == [(99, [42]), (94, [42]), (90, [42])]


def test_an_episode_ends_after_so_many_turns_and_the_last_answer_is_not_read():
    episode = play(Scripted(*[Turn("ab")] * 9), Engine(), max_assistant_turns=2)
    assert episode.finish_reason == "turns" and episode.num_turns == 2
    assert len(episode.ids) == 3 + 2 + 3 and episode.mask[-1]


def test_an_episode_ends_when_its_tokens_are_used_up():
    episode = play(Scripted(*[Turn("ab")] * 9), Engine(), max_new_tokens=9)
    assert episode.finish_reason == "length" and len(episode.ids) == 3 + 2 + 3  # two letters would leave no token
    cut = play(Scripted(*[Turn("ab")] * 9), Engine(), max_new_tokens=7)
    assert len(cut.ids) == 7 and cut.mask == [True] * 3 + [False] * 2 + [True] * 2
    assert cut.num_turns == 2 and cut.finish_reason == "length"


def test_a_turn_has_a_limit_of_its_own():
    engine = Engine(length=30)
    episode = play(Scripted(Turn("a"), Turn(done=True)), engine, max_tokens_per_turn=4)
    assert [budget for _, budget, _ in engine.read] == [4, 4] and len(episode.ids) == 9
    assert episode.finish_reason == "stop"  # the environment ended it, though the turn was cut off


def test_no_turn_begins_after_the_episodes_time():
    class Slow(Scripted):
        async def step(self, response):
            await asyncio.sleep(0.3)
            return Turn("a")

    episode = play(Slow(), Engine(), episode_timeout_s=0.2, tool_timeout_s=5)
    assert episode.finish_reason == "time" and episode.num_turns == 1 and episode.failure is None


class Blocking:
    """A plain, blocking tool."""

    def __init__(self, seconds):
        self.seconds = seconds

    def reset(self, prompt):
        return ""

    def step(self, response):
        time.sleep(self.seconds)
        return Turn(reward=1.0, done=True)


class Stubborn(Scripted):
    async def step(self, response):
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                asyncio.current_task().uncancel()
                await asyncio.sleep(2)
                raise


@pytest.mark.parametrize("environment", [Blocking(3), Stubborn()], ids=["blocks", "won't be cancelled"])
def test_a_tool_that_does_not_answer_ends_its_own_episode(environment):
    async def run():
        episodes = Episodes(
            lambda: environment, MultiTurnConfig(enable=True, tool_timeout_s=0.2), Encoder(), lambda ids: ""
        )
        params = SamplingParams(1.0, 1.0, -1, 100, (STOP,))
        started = time.monotonic()
        episode = await episodes.play(PROMPT, params, 42, Engine().generate)
        return episode, time.monotonic() - started

    episode, seconds = asyncio.run(run())
    assert (episode.failure.kind, episode.finish_reason, episode.num_turns) == ("timeout", "time", 1)
    assert "step gave no answer in 0.2 s" in episode.failure.reason and seconds < 1


def test_tools_that_block_do_not_hold_up_each_other_or_the_loop():
    async def run():
        knobs = MultiTurnConfig(enable=True, tool_timeout_s=5)
        episodes = Episodes(lambda: Blocking(0.3), knobs, Encoder(), lambda ids: "")
        params = SamplingParams(1.0, 1.0, -1, 100, (STOP,))
        started, ticks = time.monotonic(), 0
        playing = asyncio.gather(*(episodes.play(PROMPT, params, 1, Engine().generate) for _ in range(100)))
        while not playing.done():
            await asyncio.sleep(0.02)
            ticks += 1
        assert all(episode.paid == 1.0 for episode in await playing)
        return time.monotonic() - started, ticks

    seconds, ticks = asyncio.run(run())
    assert seconds < 5 and ticks > 3  # one after the other: 30 s


@pytest.mark.parametrize(
    ("turn", "kind", "reason"),
    [
        (ValueError("broken"), "error", "ValueError: broken"),
        (None, "invalid", "None instead of a Turn"),
        ("text", "invalid", "instead of a Turn"),
        (Turn(reward=float("nan")), "invalid", "nan instead of a finite number"),
        (Turn(reward="1"), "invalid", "'1' instead"),
        (Turn(observation=3), "invalid", "instead of a Turn with a text"),
    ],
)
def test_an_environments_mistake_ends_its_episode(turn, kind, reason):
    episode = play(Scripted(Turn("a", 0.5), turn), Engine())
    assert (episode.failure.kind, episode.finish_reason, episode.paid) == (kind, "error", 0.5)
    assert reason in episode.failure.reason and episode.mask[-1] and episode.num_turns == 2


def test_a_beginning_that_fails_leaves_an_episode_without_a_token():
    class Broken(Scripted):
        async def reset(self, prompt):
            raise OSError("no such level")

    engine = Engine()
    episode = play(Broken(), engine)
    assert (episode.ids, episode.failure.kind, engine.read) == ([], "error", [])
    assert play(Scripted(opening=None), engine).failure.kind == "invalid"


def test_metrics_of_episodes_by_hand():
    def trajectory(mask, turns, reason):
        n = len(mask)
        return Trajectory([1], [2] * n, [0.0] * n, mask, 0.0, 0, 0, reason, num_turns=turns)

    played = [trajectory([True, False, True], 2, "turns"), trajectory([True], 1, "time")]
    assert episode_metrics(played) == {
        "rollout/turns_mean": (3, 2),
        "rollout/turns_max": (2, 1),
        "rollout/observation_fraction": (1, 4),
        "rollout/ended_by_turns_fraction": (1, 2),
        "rollout/ended_by_time_fraction": (1, 2),
        "rollout/ended_by_error_fraction": (0, 2),
    }


def test_every_token_of_an_episode_has_a_version():
    episode = Episode()
    episode.read([8])  # an opening, before anything was sampled
    episode.say(Completion([4, 5], [-0.5, -1.0], "stop", 3, [3, 4]))
    episode.read([9, 9])
    episode.say(Completion([6], [-2.0], "stop", 6))
    assert (episode.versions, episode.version) == ([-1, 3, 4, 4, 4, 6], 3)
    assert len(episode.versions) == len(episode.ids) == len(episode.mask)
