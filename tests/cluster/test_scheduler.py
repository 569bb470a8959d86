"""What is sampled when, and who gets it, on fake engines: no Ray, no model, milliseconds."""

import asyncio
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from rlhf_mp.cluster.groups import step_metrics
from rlhf_mp.cluster.scheduler import RolloutScheduler
from rlhf_mp.config.load import config_from_dict
from rlhf_mp.config.reward import Term
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.data.order import PromptOrder
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.data.types import Share, Trajectory
from rlhf_mp.errors import CheckpointError, EngineError
from rlhf_mp.rewards.weighted import WeightedReward
from rlhf_mp.rollout.base import Completion, FixedEngines
from rlhf_mp.rollout.sampler import Sampler

PROMPTS = [Prompt(i, [100 + i] * (1 + i % 3), f"question {i}", str(i)) for i in range(10)]
VALIDATION = {"held_out": [Prompt(i, [200 + i], f"held out {i}", str(i)) for i in range(4)]}
STOP = [1, 7]
ROLLOUT = "actor_rollout_ref.rollout"
STALENESS = f"{ROLLOUT}.max_staleness"
AHEAD = ("trainer.placement=disjoint", f"{ROLLOUT}.top_p=1", f"{ROLLOUT}.top_k=-1", "trainer.total_training_steps=99")


class FakeEngine:
    """Samples from whatever version its ``live`` says: ids are the prompt's first, a length and the stop token."""

    def __init__(self):
        self.live = -1
        self.asked = []

    async def generate(self, prompt_ids, params, seeds):
        self.asked.append((prompt_ids[0], params, list(seeds)))
        await asyncio.sleep(0)
        responses = [[prompt_ids[0]] * (1 + i % 3) + [1] for i in range(len(seeds))]
        return [Completion(ids, [-0.5] * len(ids), "stop", self.live) for ids in responses]


class DeadEngine(FakeEngine):
    async def generate(self, prompt_ids, params, seeds):
        raise EngineError("SGLang engine 0", "was killed by SIGKILL")


class Decoder:
    def decode(self, ids, *, skip_special_tokens):
        return str(ids[0] % 100)


class AnswerReward:
    """1 for the even ones among right answers: so that groups differ."""

    async def score(self, prompt, responses):
        return [float(response.text == prompt.answer and prompt.index % 2 == 0) for response in responses]


@cache
def config_of(overrides: tuple[str, ...]) -> RunConfig:
    tree = {
        "data": {"train_batch_size": 4, "max_prompt_length": 8, "max_response_length": 8, "seed": 3},
        "actor_rollout_ref": {
            "model": {"path": "models/m"},
            "actor": {"ppo_mini_batch_size": 2, "ppo_max_token_len_per_gpu": 24},
            "rollout": {"n": 3, "temperature": 0.9, "top_p": 0.8, "top_k": 50},
        },
        "trainer": {"n_gpus_per_node": 2, "seed": 11, "device": "cpu"},
    }
    return config_from_dict(tree, overrides)


def scheduler(engine: FakeEngine, *overrides: str, validation=VALIDATION, max_staleness: int = 0) -> RolloutScheduler:
    ahead = (*AHEAD, f"{STALENESS}={max_staleness}") if max_staleness else ()
    config = config_of((*ahead, *overrides))
    reward = WeightedReward([(Term("answer", "answer"), AnswerReward())])
    sampler = Sampler(Decoder(), reward)
    sampler.connect(FixedEngines([engine]))
    order = PromptOrder(len(PROMPTS), config.data.train_batch_size, config.data.seed, config.data.shuffle)
    return RolloutScheduler(config, sampler, reward, PROMPTS, order, validation, STOP)


async def publish(made: RolloutScheduler, engine: FakeEngine, version: int) -> None:
    engine.live = version
    await made.publish(version)


async def shares(made: RolloutScheduler, step: int, num_ranks: int = 2) -> list[Share]:
    return await asyncio.gather(*(made.fetch(step, rank) for rank in range(num_ranks)))


def prompts_of(of_step: list[Share]) -> list[int]:
    return sorted({t.prompt_ids[0] for share in of_step for t in share.trajectories})


def test_nothing_is_sampled_before_its_version_is_live():
    async def run():
        engine = FakeEngine()
        made = scheduler(engine)
        waiting = asyncio.create_task(made.fetch(0, 0))
        await asyncio.sleep(0.01)
        assert not waiting.done() and engine.asked == []

        await publish(made, engine, 0)
        assert {t.version for t in (await waiting).trajectories} == {0}

        waiting = asyncio.create_task(made.fetch(1, 0))
        await asyncio.sleep(0.01)
        assert not waiting.done() and len(engine.asked) == 4
        await publish(made, engine, 1)
        assert {t.version for t in (await waiting).trajectories} == {1}

    asyncio.run(run())


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_no_sample_is_staler_than_allowed_and_no_prompt_is_lost(max_staleness):
    async def run():
        engine = FakeEngine()
        made = scheduler(engine, max_staleness=max_staleness)
        seen, staleness = [], set()
        for step in range(8):
            await publish(made, engine, step)
            of_step = await shares(made, step)
            trajectories = [t for share in of_step for t in share.trajectories]
            staleness |= {step - t.version for t in trajectories}
            seen += prompts_of(of_step)
            assert len(trajectories) == 4 * 3
        assert min(staleness) >= 0 and max(staleness) == max_staleness
        # 8 steps of 4 prompts, two steps to an epoch of 10: nobody twice in an epoch
        assert all(len(set(seen[i : i + 8])) == 8 for i in range(0, 32, 8))

    asyncio.run(run())


def test_given_prompts_take_the_place_of_a_steps_own_and_the_data_stays_where_it_is():
    async def run():
        engine = FakeEngine()
        made, plain = scheduler(engine), scheduler(engine)
        given = [Prompt(i, [150 + i], f"given {i}", str(i)) for i in range(6)]
        await publish(made, engine, 2)
        await publish(plain, engine, 2)
        before = await shares(made, 0)
        of_step = await asyncio.gather(*(made.sample(1, given, rank) for rank in range(2)))
        assert prompts_of(of_step) == [150, 151, 152, 153, 154, 155]
        assert sum(len(share.trajectories) for share in of_step) == 6 * 3
        assert "rollout/epoch" not in of_step[0].metrics and "rollout/reward_mean" in of_step[0].metrics
        assert made.state_dict(2) == made.state_dict(1)
        after = await shares(made, 2)
        assert [prompts_of(before), prompts_of(after)] == [prompts_of(await shares(plain, step)) for step in (0, 1)]

    asyncio.run(run())


def test_a_step_that_is_gone_back_to_is_sampled_again():
    async def run():
        engine = FakeEngine()
        made = scheduler(engine)
        await publish(made, engine, 1)
        await shares(made, 0)
        place = made.state_dict(1)
        first = prompts_of(await shares(made, 1))
        asked = len(engine.asked)
        made.load_state_dict(place)
        assert prompts_of(await shares(made, 1)) == first and len(engine.asked) == 2 * asked - 4

    asyncio.run(run())


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_ranks_shares_are_whole_groups_and_together_the_whole_step(num_ranks):
    async def run():
        engine = FakeEngine()
        made = scheduler(engine, f"trainer.n_gpus_per_node={num_ranks}")
        await publish(made, engine, 0)
        of_step = await shares(made, 0, num_ranks)
        groups = [Counter(t.group_id for t in share.trajectories) for share in of_step]
        assert sum(groups, Counter()) == Counter({0: 3, 1: 3, 2: 3, 3: 3})
        assert all(size == 3 for of_rank in groups for size in of_rank.values())  # none is split
        assert len({tuple(len(m.micro_batches) for m in share.minibatches) for share in of_step}) == 1
        assert len({len(share.score_rows) for share in of_step}) == 1

    asyncio.run(run())


def test_every_row_is_trained_on_once_an_epoch_and_totals_are_of_all_ranks():
    async def run():
        engine = FakeEngine()
        made = scheduler(engine, "actor_rollout_ref.actor.ppo_epochs=2")
        await publish(made, engine, 0)
        of_step = await shares(made, 0)
        for share in of_step:
            rows = [row for m in share.minibatches for rows in m.micro_batches for row in rows]
            assert Counter(rows) == Counter(dict.fromkeys(range(len(share.trajectories)), 2))
            assert sorted(row for rows in share.score_rows for row in rows) == [*range(len(share.trajectories))]
        assert len(of_step[0].minibatches) == 4  # 4 prompts by 2, twice
        for number in range(4):
            totals = {share.minibatches[number].totals for share in of_step}
            assert [t.num_sequences for t in totals] == [6]  # 2 groups of 3, the same on both ranks
        tokens = sum(m.totals.num_tokens for m in of_step[0].minibatches)
        assert tokens == 2 * sum(len(t.response_ids) for share in of_step for t in share.trajectories)

    asyncio.run(run())


def test_an_engines_failure_reaches_every_rank_as_itself():
    async def run():
        made = scheduler(DeadEngine())
        await made.publish(0)
        results = await asyncio.gather(*(made.fetch(0, rank) for rank in range(2)), return_exceptions=True)
        assert [str(r) for r in results] == ["SGLang engine 0: was killed by SIGKILL"] * 2
        assert {type(r) for r in results} == {EngineError}

    asyncio.run(run())


def test_a_rank_that_gives_up_waiting_does_not_cancel_the_others():
    async def run():
        engine = FakeEngine()
        made = scheduler(engine)
        first, second = (asyncio.create_task(made.fetch(0, rank)) for rank in range(2))
        await asyncio.sleep(0.01)
        first.cancel()
        await publish(made, engine, 0)
        assert (await second).trajectories

    asyncio.run(run())


def test_engines_get_the_knobs_of_training_and_the_tokens_that_end_a_response():
    async def run():
        engine = FakeEngine()
        made = scheduler(engine)
        await publish(made, engine, 0)
        await made.fetch(0, 0)
        params = engine.asked[0][1]
        assert (params.temperature, params.top_p, params.top_k, params.max_new_tokens) == (0.9, 0.8, 50, 8)
        assert params.stop_token_ids == (1, 7)

    asyncio.run(run())


async def sampled(made: RolloutScheduler, engine: FakeEngine, steps: range) -> list:
    """For each step the prompts in order with their seeds, and who got which."""
    found = []
    for step in steps:
        await publish(made, engine, step)
        engine.asked.clear()
        of_step = await shares(made, step)
        found.append(([(first, tuple(seeds)) for first, _, seeds in engine.asked], of_step[0].trajectories))
    return found


def unversioned(found: list) -> list:
    return [(asked, [replace(t, version=0) for t in trajectories]) for asked, trajectories in found]


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_resumed_run_samples_what_an_uninterrupted_one_would_have(max_staleness):
    async def run():
        engine = FakeEngine()
        straight = scheduler(engine)
        expected = await sampled(straight, engine, range(7))

        engine = FakeEngine()
        stopped = scheduler(engine, max_staleness=max_staleness)
        await sampled(stopped, engine, range(3))
        state = stopped.state_dict(3)  # whatever has been sampled ahead meanwhile

        engine = FakeEngine()
        resumed = scheduler(engine)
        resumed.load_state_dict(state)
        assert await sampled(resumed, engine, range(3, 7)) == expected[3:]

    asyncio.run(run())


def test_a_resumed_run_with_other_data_is_refused():
    async def run():
        engine = FakeEngine()
        made = scheduler(engine)
        await publish(made, engine, 0)
        await made.fetch(0, 0)
        with pytest.raises(CheckpointError, match="order of prompts"):
            scheduler(engine, "data.seed=4").load_state_dict(made.state_dict(1))

    asyncio.run(run())


def test_every_response_has_a_seed_of_its_own_unless_the_run_need_not_be_reproducible():
    async def run():
        engine = FakeEngine()
        found = await sampled(scheduler(engine), engine, range(3))
        seeds = [seed for asked, _ in found for _, group in asked for seed in group]
        assert len(set(seeds)) == 3 * 4 * 3

        free = scheduler(engine, "actor_rollout_ref.rollout.reproducible=false")
        found = await sampled(free, engine, range(1))
        assert {seed for asked, _ in found for _, group in asked for seed in group} == {None}

    asyncio.run(run())


def test_validation_is_by_its_own_knobs_with_the_same_seeds_every_time():
    async def run():
        engine = FakeEngine()
        made = scheduler(
            engine,
            "actor_rollout_ref.rollout.val_kwargs.n=2",
            "actor_rollout_ref.rollout.val_kwargs.temperature=0.5",
            "actor_rollout_ref.rollout.val_kwargs.top_p=0.7",
        )
        evaluation = await made.evaluate()
        # prompts 0 and 2 of 4 are solved, by both responses; lengths are 2 and 3 tokens
        assert evaluation.metrics["accuracy"] == (4, 8)
        assert evaluation.metrics["reward_mean"] == (4.0, 8)
        assert evaluation.metrics["response_length_mean"] == (20, 8)
        shown = [(s.prompt, s.in_log) for s in evaluation.samples]
        assert shown == [(f"held out {g}", g < 2 and i == 0) for g in range(4) for i in range(2)]
        assert {s.source for s in evaluation.samples} == {"held_out"}
        params = engine.asked[0][1]
        assert (params.temperature, params.top_p, params.top_k, params.max_new_tokens) == (0.5, 0.7, -1, 8)
        first = [(prompt, seeds) for prompt, _, seeds in engine.asked]
        engine.asked.clear()
        await made.evaluate()
        assert [(prompt, seeds) for prompt, _, seeds in engine.asked] == first

    asyncio.run(run())


def test_several_validation_files_are_told_by_themselves_and_together():
    async def run():
        engine = FakeEngine()
        parts = {"odd": VALIDATION["held_out"][1::2], "even": VALIDATION["held_out"][::2]}
        made = scheduler(engine, "trainer.log_val_generations=1", "trainer.log_samples=0", validation=parts)
        evaluation = await made.evaluate()
        accuracy = {name: pair for name, pair in evaluation.metrics.items() if name.endswith("accuracy")}
        assert accuracy == {"accuracy": (2, 4), "odd/accuracy": (0, 2), "even/accuracy": (2, 2)}
        assert [(s.source, s.prompt) for s in evaluation.samples] == [("odd", "held out 1"), ("even", "held out 0")]
        seeds = [tuple(seeds) for _, _, seeds in engine.asked]
        assert len(set(seeds)) == len(seeds) == 4

    asyncio.run(run())


def test_validation_does_not_move_the_training_data():
    async def run():
        engine, other = FakeEngine(), FakeEngine()
        made, plain = scheduler(engine), scheduler(other)
        await made.evaluate()
        assert await sampled(made, engine, range(2)) == await sampled(plain, other, range(2))

    asyncio.run(run())


def test_metrics_and_texts_are_told_by_the_first_rank_alone():
    async def run():
        engine = FakeEngine()
        made = scheduler(engine, "trainer.log_samples=1")
        await publish(made, engine, 0)
        first, second = await shares(made, 0)
        assert second.metrics == {} and second.samples == []
        assert first.metrics["reward_term/answer/failed_fraction"] == (0, 12)  # of this step, not since the start
        assert first.metrics["rollout/epoch"] == (0, 1)
        assert [text.in_log for text in first.samples] == [True, False, False]  # all responses to one prompt
        for text in first.samples:
            assert text.truth == text.response and text.prompt == f"question {text.truth}"
            trained = first.trajectories[text.row]
            assert (text.trace.ids, text.trace.logprobs) == (trained.response_ids, trained.response_logprobs)
            assert (text.reward, text.source) == (trained.reward, "training")

    asyncio.run(run())


def response(group: int, length: int, reward: float, *, reason="stop", version: int = 3) -> Trajectory:
    return Trajectory([1] * 4, [2] * length, [0.0] * length, [True] * length, reward, group, version, reason)


def test_metrics_of_a_step_by_hand():
    groups = [
        [response(0, 2, 1.0), response(0, 6, 1.0)],  # solved, no spread
        [response(1, 3, 0.0), response(1, 5, 1.0, reason="length", version=2)],
        [response(2, 1, 0.0), response(2, 1, 0.0)],  # no spread
    ]
    metrics = {name.removeprefix("rollout/"): pair for name, pair in step_metrics(groups, step=3).items()}
    assert metrics == {
        "reward_mean": (3.0, 6),
        "reward_std": (0.5, 1),
        "solved_groups_fraction": (1, 3),
        "groups_without_spread_fraction": (2, 3),
        "response_tokens": (18, 1),
        "response_length_mean": (18, 6),
        "response_length_max": (6, 1),
        "prompt_length_mean": (24, 6),
        "truncated_fraction": (1, 6),
        "staleness_mean": (1, 6),
    }
