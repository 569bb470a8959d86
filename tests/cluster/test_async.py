"""R1 and the data under sampling ahead, as properties: any order of events, any staleness, resumed anywhere."""

import asyncio
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import PROMPTS, ROLLOUT, FakeEngine, prompts_of, publish, scheduler, shares

from rlhf_mp.data.order import PromptOrder
from rlhf_mp.rollout.base import Completion
from rlhf_mp.rollout.sampler import response_seed

NUM_STEPS, BATCH, RESPONSES, RUN_SEED = 7, 4, 3, 11
STEP_OF = {
    response_seed(RUN_SEED, step, place, i): step
    for step in range(NUM_STEPS + 8)
    for place in range(2 * BATCH)
    for i in range(RESPONSES)
}
OVER_SAMPLED = f"{ROLLOUT}.over_sample_rate=0.5"


class SlowEngine(FakeEngine):
    """Takes as many turns of the event loop for a token as it is told; a swap may come between two tokens."""

    def __init__(self, turns: list[int]):
        super().__init__()
        self.turns = turns
        self.started: list[tuple[int, int]] = []  # (step, live version)

    async def generate(self, prompt_ids, params, seeds):
        self.started.append((STEP_OF[seeds[0]], self.live))
        versions = []
        for _ in range(2):
            for _ in range(self.turns[len(self.started) % len(self.turns)]):
                await asyncio.sleep(0)
            versions.append(self.live)
        return [
            Completion([prompt_ids[0], 1], [-0.5] * 2, "stop", versions[0], list(versions)) for _ in range(len(seeds))
        ]


async def train(made, engine, steps: range, turns: list[int], max_staleness: int) -> list[list[int]]:
    """The prompts that each step trained on; the rules are checked on the way."""
    found = []
    for step in steps:
        await publish(made, engine, step)
        for _ in range(turns[step % len(turns)]):  # the trainer does something else
            await asyncio.sleep(0)
        of_step = await shares(made, step)
        trajectories = [t for share in of_step for t in share.trajectories]
        assert len(trajectories) == BATCH * RESPONSES
        assert all(step - max_staleness <= v <= step for t in trajectories for v in t.token_versions)
        assert all(t.version == min(t.token_versions) for t in trajectories)
        assert of_step[0].metrics["rollout/token_staleness_max"][0] <= max_staleness
        found.append(sorted({t.group_id: t.prompt_ids[0] for t in trajectories}.values()))
        for _ in range(turns[-1 - step % len(turns)]):
            await asyncio.sleep(0)
    assert all(live >= max(0, step - max_staleness) for step, live in engine.started)
    return found


def in_order(num_batches: int) -> list[int]:
    order = PromptOrder(len(PROMPTS), BATCH, 3, True)
    return [100 + index for _ in range(num_batches) for index in order.next()[1]]


def position(state) -> int:
    return state["epoch"] * (len(PROMPTS) // BATCH) + state["batch"]


@settings(max_examples=25)
@given(
    max_staleness=st.integers(0, 4),
    turns=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    stop_after=st.integers(1, NUM_STEPS - 1),
)
def test_every_step_has_its_prompts_and_no_token_is_too_old_also_after_a_resume(max_staleness, turns, stop_after):
    async def run():
        engine = SlowEngine(turns)
        made = scheduler(engine, max_staleness=max_staleness)
        before = await train(made, engine, range(stop_after), turns, max_staleness)
        state = made.state_dict(stop_after)  # whatever is sampled ahead by now

        engine = SlowEngine(turns[::-1])
        resumed = scheduler(engine, max_staleness=max_staleness)
        resumed.load_state_dict(state)
        after = await train(resumed, engine, range(stop_after, NUM_STEPS), turns, max_staleness)
        expected = in_order(NUM_STEPS)
        assert before + after == [sorted(expected[i : i + BATCH]) for i in range(0, len(expected), BATCH)]
        assert "returned" not in state

    asyncio.run(run())


@settings(max_examples=25)
@given(
    max_staleness=st.integers(0, 3),
    turns=st.lists(st.integers(0, 9), min_size=2, max_size=7),
    stop_after=st.integers(1, NUM_STEPS - 1),
)
def test_no_prompt_is_lost_or_twice_there_when_stragglers_are_aborted(max_staleness, turns, stop_after):
    async def run():
        engine = SlowEngine(turns)
        made = scheduler(engine, OVER_SAMPLED, max_staleness=max_staleness)
        used = Counter(p for ps in await train(made, engine, range(stop_after), turns, max_staleness) for p in ps)
        for steps in (range(stop_after, NUM_STEPS), range(NUM_STEPS, NUM_STEPS + 3)):
            state = made.state_dict(steps.start)
            returned = Counter(100 + index for _, index in state.get("returned", []))
            assert used + returned == Counter(in_order(position(state)))
            engine = SlowEngine(turns[::-1])
            made = scheduler(engine, OVER_SAMPLED, max_staleness=max_staleness)
            made.load_state_dict(state)
            used += Counter(p for ps in await train(made, engine, steps, turns, max_staleness) for p in ps)

    asyncio.run(run())


def test_the_first_complete_groups_are_taken_and_the_others_come_first_in_the_next_step():
    class Stuck(FakeEngine):
        """Never answers to what it is told."""

        def __init__(self, stuck: set[int]):
            super().__init__()
            self.stuck, self.cancelled = stuck, []

        async def generate(self, prompt_ids, params, seeds):
            if prompt_ids[0] in self.stuck:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    self.cancelled.append(prompt_ids[0])
                    raise
            return await super().generate(prompt_ids, params, seeds)

    async def run():
        order = in_order(3)
        engine = Stuck({order[0], order[3]})
        made = scheduler(engine, OVER_SAMPLED)
        await publish(made, engine, 0)
        of_step = await shares(made, 0)
        assert prompts_of(of_step) == sorted([order[1], order[2], order[4], order[5]])
        assert engine.cancelled == [order[0], order[3]]
        assert of_step[0].metrics["rollout/aborted_groups"] == (2, 1)
        engine.stuck = set(order[6:8])
        await publish(made, engine, 1)
        assert prompts_of(await shares(made, 1)) == sorted({order[0], order[3], order[8], order[9]})

    asyncio.run(run())


def test_nothing_is_sampled_that_no_step_will_train_on():
    async def run():
        engine = FakeEngine()
        made = scheduler(engine, "trainer.total_training_steps=3", max_staleness=4)
        await publish(made, engine, 0)
        await shares(made, 0)
        for _ in range(99):
            await asyncio.sleep(0)
        assert len(engine.asked) == 3 * BATCH

    asyncio.run(run())


def test_a_rank_that_is_early_does_not_make_engines_sample_from_the_weights_they_started_with():
    async def run():
        engine = FakeEngine()
        made = scheduler(engine, max_staleness=2)
        early = asyncio.create_task(made.fetch(0, 1))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not engine.asked
        await publish(made, engine, 0)
        await early

    asyncio.run(run())


def test_whoever_holds_the_same_share_is_told_the_same():
    async def run():
        engine = FakeEngine()
        made = scheduler(engine)
        await publish(made, engine, 0)
        first, second = await asyncio.gather(made.fetch(0, 0), made.fetch(0, 0))
        assert first.metrics == second.metrics and first.metrics["queue/ranks_waited_s"][0] >= 0

    asyncio.run(run())
