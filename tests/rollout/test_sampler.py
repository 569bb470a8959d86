"""Groups over several engines, on fakes: who samples what, in which order it comes back, what a failure does."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_mp.config.multi_turn import MultiTurnConfig
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.environments.base import Turn
from rlhf_mp.errors import EngineError
from rlhf_mp.rewards.weighted import Worth
from rlhf_mp.rollout.base import Completion, FixedEngines, SamplingParams
from rlhf_mp.rollout.episodes import Episodes
from rlhf_mp.rollout.sampler import Sampler, response_seed

PARAMS = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=7, stop_token_ids=(1,))
PROMPTS = [Prompt(i, [10 + i] * (i + 1), f"question {i}", f"answer {i}") for i in range(6)]


class FakeEngine:
    """Answers with its prompt and the seed once ``gate`` opens."""

    def __init__(self):
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked: list[tuple[list[int], SamplingParams, list[int | None]]] = []
        self.cancelled = 0

    async def generate(self, prompt_ids, params, seeds):
        self.asked.append((prompt_ids, params, list(seeds)))
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return [Completion([*prompt_ids, seed or 0], [-0.5] * (len(prompt_ids) + 1), "stop", 4) for seed in seeds]


class DeadEngine(FakeEngine):
    async def generate(self, prompt_ids, params, seeds):
        await asyncio.sleep(0)
        raise EngineError("engine 1", "was killed by SIGKILL")


class Decoder:
    def decode(self, ids, *, skip_special_tokens):
        assert skip_special_tokens
        return " ".join(map(str, ids))


class LastTokenReward:
    """Worth the response's last number; keeps what it was asked."""

    def __init__(self):
        self.asked = []

    async def score(self, prompt, responses):
        self.asked.append((prompt, [response.text for response in responses]))
        return [Worth(float(r.text.split()[-1]), {"last": float(r.num_tokens)}) for r in responses]


def sampler(*engines: FakeEngine) -> tuple[Sampler, LastTokenReward]:
    reward = LastTokenReward()
    made = Sampler(Decoder(), reward)
    made.connect(FixedEngines(engines))
    return made, reward


def test_a_trajectory_carries_what_was_sampled_and_its_reward():
    async def run():
        made, reward = sampler(FakeEngine())
        responses = await made.group(PROMPTS[1], PARAMS, [5, 6], group_id=9)
        assert [(t.prompt_ids, t.response_ids, t.reward) for t in responses] == [
            ([11, 11], [11, 11, 5], 5.0),
            ([11, 11], [11, 11, 6], 6.0),
        ]
        assert {(t.group_id, t.version, t.finish_reason) for t in responses} == {(9, 4, "stop")}
        assert responses[0].response_logprobs == [-0.5] * 3 and responses[0].loss_mask == [True] * 3
        assert [t.scores for t in responses] == [{"last": 3.0}] * 2
        assert reward.asked == [(PROMPTS[1], ["11 11 5", "11 11 6"])]  # the whole group at once

    asyncio.run(run())


def test_episodes_of_a_group_are_played_by_one_engine_and_judged_together():
    class Twice:
        """Ends after two turns, and pays a half for each."""

        async def reset(self, prompt):
            self.turns = 0
            return ""

        async def step(self, response):
            self.turns += 1
            return Turn("x", 0.5, done=self.turns == 2)

    class Encoder:
        chat = False

        def between(self, sampled, observation):
            return [99]

        def opening(self, observation):
            return []

    class Paid(LastTokenReward):
        async def score(self, prompt, responses):
            self.asked.append([(r.text, r.num_tokens, r.paid) for r in responses])
            return [Worth(2 * r.paid, {}, 2.0) for r in responses]

    async def run():
        engines, reward = [FakeEngine(), FakeEngine()], Paid()
        episodes = Episodes(Twice, MultiTurnConfig(enable=True), Encoder(), lambda ids: "")
        made = Sampler(Decoder(), reward, episodes)
        made.connect(FixedEngines(engines))
        responses = await made.group(PROMPTS[0], replace(PARAMS, max_new_tokens=20), [5, 6], group_id=2)
        # FakeEngine answers with what it read and the seed: 10 5, then (with the observation 99) 10 10 5 99 5
        assert [t.response_ids for t in responses] == [[10, s, 99, 10, 10, s, 99, s] for s in (5, 6)]
        assert [t.loss_mask for t in responses] == [[True] * 2 + [False] + [True] * 5] * 2
        assert {(t.num_turns, t.reward, t.finish_reason, t.group_id) for t in responses} == {(2, 2.0, "stop", 2)}
        assert [t.payments for t in responses] == [[(1, 1.0), (7, 1.0)]] * 2
        assert reward.asked == [[("10 10 5 99 5", 7, 1.0), ("10 10 6 99 6", 7, 1.0)]]  # the last turn is the text
        assert (len(engines[0].asked), len(engines[1].asked)) == (4, 0)

    asyncio.run(run())


def test_the_engine_gets_the_prompt_and_the_parameters_as_they_are():
    async def run():
        engine = FakeEngine()
        made, _ = sampler(engine)
        await made.groups(PROMPTS[:2], PARAMS, [[3, 4], [None]])
        assert engine.asked == [([10], PARAMS, [3, 4]), ([11, 11], PARAMS, [None])]

    asyncio.run(run())


def test_groups_come_back_in_the_order_of_their_prompts_whatever_ends_first():
    async def run():
        slow, fast = FakeEngine(), FakeEngine()
        slow.gate.clear()
        made, reward = sampler(slow, fast)
        asyncio.get_running_loop().call_later(0.02, slow.gate.set)
        groups = await made.groups(PROMPTS, PARAMS, [[i] for i in range(6)])
        assert [[(t.group_id, t.response_ids[-1]) for t in group] for group in groups] == [[(i, i)] for i in range(6)]
        judged = [prompt.index for prompt, _ in reward.asked]
        assert judged != sorted(judged)  # a group is judged once it is complete, not after all the others

    asyncio.run(run())


def test_each_group_goes_to_the_engine_with_the_fewest_responses_in_flight():
    async def run():
        engines = [FakeEngine(), FakeEngine(), FakeEngine()]
        for engine in engines:
            engine.gate.clear()
        made, _ = sampler(*engines)
        sizes = [5, 1, 2, 1, 1, 1]  # 5 | 1 | 2, then to the second (1), the second or third (2), the other
        sampling = asyncio.create_task(made.groups(PROMPTS, PARAMS, [list(range(n)) for n in sizes]))
        await asyncio.sleep(0.01)
        assert [sum(len(seeds) for _, _, seeds in engine.asked) for engine in engines] == [5, 3, 3]
        for engine in engines:
            engine.gate.set()
        await sampling
        await made.group(PROMPTS[0], PARAMS, [1], 0)
        assert len(engines[0].asked) == 2  # nothing is in flight any more: the first again

    asyncio.run(run())


def test_the_first_failure_is_raised_as_itself_and_cancels_the_rest():
    async def run():
        waiting, dead = FakeEngine(), DeadEngine()
        waiting.gate.clear()
        made, reward = sampler(waiting, dead)
        with pytest.raises(EngineError, match="engine 1: was killed by SIGKILL"):
            await made.groups(PROMPTS[:2], PARAMS, [[0], [1]])
        assert waiting.cancelled == 1 and reward.asked == []

    asyncio.run(run())


def test_a_failed_group_is_in_flight_no_more():
    async def run():
        dead, alive = DeadEngine(), FakeEngine()
        made, _ = sampler(dead, alive)
        for _ in range(2):  # the dead one is the least loaded again
            with pytest.raises(EngineError):
                await made.group(PROMPTS[0], PARAMS, [0, 1], 0)
        assert alive.asked == []

    asyncio.run(run())


@given(*[st.integers(0, 2**31) for _ in range(4)])
def test_a_seed_is_a_function_of_where_a_response_stands_in_the_run(seed, step, group, response):
    found = response_seed(seed, step, group, response)
    assert found == response_seed(seed, step, group, response) and 0 <= found < 2**63


def test_no_two_responses_of_a_run_share_a_seed():
    places = [
        (seed, step, group, i) for seed in (0, 1) for step in range(-1, 12) for group in range(12) for i in range(12)
    ]
    assert len({response_seed(*place) for place in places}) == len(places)


class FakeRewardServer:
    """A sequence is worth its sum; keeps what it was asked."""

    def __init__(self):
        self.asked = []

    async def score(self, sequences):
        self.asked.append(sequences)
        return [float(sum(sequence)) for sequence in sequences]


class Servers:
    def __init__(self, server):
        self.server, self.numbers = server, []

    async def run(self, number, work):
        self.numbers.append(number)
        return await work(self.server)

    def metrics(self):
        return {"reward_model/restarts": (1, 1)}


def test_a_served_reward_model_scores_whole_sequences_and_equal_ones_once():
    async def run():
        made, _ = sampler(FakeEngine())
        server = FakeRewardServer()
        servers = Servers(server)
        made.connect(made.engines, servers)
        found = await made.group(PROMPTS[1], PARAMS, [5, 6, 5], group_id=0)
        assert server.asked == [[(11, 11, 11, 11, 5), (11, 11, 11, 11, 6)]] and servers.numbers == [2]
        assert [t.rm_score for t in found] == [49.0, 50.0, 49.0]
        assert [t.reward for t in found] == [5.0, 6.0, 5.0]  # the rule's, as without it
        assert made.metrics() == {"reward_model/restarts": (1, 1)}

    asyncio.run(run())


def test_without_one_there_are_no_scores():
    async def run():
        made, _ = sampler(FakeEngine())
        assert [t.rm_score for t in await made.group(PROMPTS[0], PARAMS, [1, 2], group_id=0)] == [None, None]
        assert made.metrics() == {}

    asyncio.run(run())
