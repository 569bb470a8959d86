"""What algorithms ask of the scheduler: groups that differ, greedy baselines, shaped rewards."""

import asyncio
from dataclasses import replace

import pytest
from test_scheduler import AnswerReward, FakeEngine, prompts_of, publish, scheduler, shares

from rlhf_mp.errors import SampleError
from rlhf_mp.rewards.weighted import Worth
from rlhf_mp.rollout.base import Completion

FILTER = "algorithm.filter_groups.enable=true"


class Guessing(FakeEngine):
    """Right or wrong by the seed: groups may differ."""

    async def generate(self, prompt_ids, params, seeds):
        self.asked.append((prompt_ids[0], params, list(seeds)))
        await asyncio.sleep(0)
        ids = [[prompt_ids[0] if (seed or 0) % 3 else 1, 1] for seed in seeds]
        return [Completion(own, [-0.5] * len(own), "stop", self.live) for own in ids]


def timeless(share):
    """Without what the clock decides."""
    kept = {name: x for name, x in share.metrics.items() if "latency" not in name and not name.startswith("queue/")}
    return replace(share, metrics=kept)


async def steps(made, engine, numbers):
    found = []
    for step in numbers:
        await publish(made, engine, step)
        engine.asked.clear()
        of_step = [timeless(share) for share in await shares(made, step)]
        found.append(([asked[0] for asked in engine.asked], of_step))
    return found


def test_a_dynamic_step_is_full_of_groups_that_differ_and_tells_what_it_took():
    async def run():
        engine = Guessing()
        made = scheduler(engine, FILTER)
        for asked, of_step in await steps(made, engine, range(4)):
            trajectories = [t for share in of_step for t in share.trajectories]
            by_group = {}
            for t in trajectories:
                by_group.setdefault(t.group_id, []).append(t.reward)
            assert sorted(by_group) == [0, 1, 2, 3] and all(len(set(r)) > 1 for r in by_group.values())
            batches, _ = of_step[0].metrics["rollout/num_gen_batches"]
            assert len(asked) == 4 * batches
            assert of_step[0].metrics["rollout/groups_without_spread_fraction"] == (0, 4)
            assert len(of_step[0].trajectories) == len(of_step[1].trajectories) == 6

    asyncio.run(run())


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_resumed_dynamic_run_draws_what_an_uninterrupted_one_would_have(max_staleness):
    async def run():
        engine = Guessing()
        straight = await steps(scheduler(engine, FILTER), engine, range(6))

        engine = Guessing()
        stopped = scheduler(engine, FILTER, max_staleness=max_staleness)
        await steps(stopped, engine, range(3))
        state = stopped.state_dict(3)

        engine = Guessing()
        resumed = scheduler(engine, FILTER)
        resumed.load_state_dict(state)
        assert await steps(resumed, engine, range(3, 6)) == straight[3:]

    asyncio.run(run())


def test_prompts_that_teach_nothing_end_the_run_with_the_reason():
    async def run():
        engine = FakeEngine()  # every response to a prompt is the same
        made = scheduler(engine, FILTER, "algorithm.filter_groups.max_num_gen_batches=3")
        await publish(made, engine, 0)
        results = await asyncio.gather(*(made.fetch(0, rank) for rank in range(2)), return_exceptions=True)
        assert {type(r) for r in results} == {SampleError}
        assert len(engine.asked) == 12

    asyncio.run(run())


def test_remax_samples_one_greedy_response_to_each_prompt():
    async def run():
        engine = FakeEngine()
        made = scheduler(engine, "algorithm.adv_estimator=remax")
        await publish(made, engine, 0)
        of_step = await shares(made, 0)
        greedy = [(first, len(seeds)) for first, params, seeds in engine.asked if params.temperature == 0]
        assert sorted(greedy) == [(prompt, 1) for prompt in prompts_of(of_step)]
        for t in (t for share in of_step for t in share.trajectories):
            assert t.baseline == t.reward  # this engine says the same greedily
        assert of_step[0].metrics["rollout/greedy_reward_mean"][0] == of_step[0].metrics["rollout/reward_mean"][0] / 12

    asyncio.run(run())


def test_without_remax_nothing_is_sampled_greedily():
    async def run():
        engine = FakeEngine()
        made = scheduler(engine)
        await publish(made, engine, 0)
        assert {t.baseline for share in await shares(made, 0) for t in share.trajectories} == {None}
        assert all(params.temperature > 0 for _, params, _ in engine.asked)

    asyncio.run(run())


def test_length_lowers_what_is_trained_on_but_not_what_is_told():
    async def run():
        overlong = ["reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=5"]
        engine, other = FakeEngine(), FakeEngine()
        shaped, plain = scheduler(engine, *overlong), scheduler(other)
        for made, own in ((shaped, engine), (plain, other)):
            await publish(made, own, 0)
        punished, free = await shares(shaped, 0), await shares(plain, 0)
        for of_rank, as_earned in zip(punished, free, strict=True):
            # at most 8 tokens, of which the last 5 are the buffer: 4 tokens are 1 too far
            for t, earned in zip(of_rank.trajectories, as_earned.trajectories, strict=True):
                assert t == replace(earned, reward=earned.reward - max(0, len(t.response_ids) - 3) / 5)
        assert punished[0].metrics["rollout/reward_mean"] == free[0].metrics["rollout/reward_mean"]
        total, count = punished[0].metrics["rollout/overlong_penalty_mean"]
        assert total / count == pytest.approx(-1 / 15)  # one response of three

    asyncio.run(run())


def test_a_reward_that_is_no_number_ends_training_and_validation():
    class Broken(AnswerReward):
        async def score(self, prompt, responses):
            return [Worth(float("nan"), {})] * len(responses)

    async def run():
        engine = FakeEngine()
        made = scheduler(engine)
        made.sampler._reward = Broken()
        with pytest.raises(SampleError, match="held out 0"):
            await made.evaluate()
        await publish(made, engine, 0)
        with pytest.raises(SampleError, match="question"):
            await made.fetch(0, 0)

    asyncio.run(run())
