"""Sums of terms: what is added, counted, timed and logged, and when a run has to end."""

import asyncio
import json
import math
import time

import pytest

from rlhf_mp.config.reward import EnvironmentTerm, RewardConfig, Term
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.errors import RewardError
from rlhf_mp.rewards.base import Failure, Response, Setting
from rlhf_mp.rewards.registered import make_reward
from rlhf_mp.rewards.weighted import MAX_LOGGED, WeightedReward

PROMPT = Prompt(0, [1], "question", "truth", "gsm8k")
RESPONSES = [Response("a"), Response("b")]


class Fixed:
    """Returns or raises what it is given, after a while."""

    def __init__(self, result, seconds=0.0):
        self.result, self.seconds = result, seconds

    async def start(self):
        return "here"

    async def score(self, prompt, responses):
        await asyncio.sleep(self.seconds)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    async def close(self):
        pass


def term(label, result, *, seconds=0.0, **knobs):
    return Term(label, label, **knobs), Fixed(result, seconds)


def judged(reward, prompt=PROMPT, responses=RESPONSES):
    return asyncio.run(reward.score(prompt, responses))


def test_terms_are_weighted_and_each_is_told_by_itself():
    reward = WeightedReward([term("math", [1, 0.0]), term("length", [-0.5, -1.0], weight=0.2)])
    first, second = judged(reward)
    assert first.reward == pytest.approx(0.9) and second.reward == pytest.approx(-0.2)  # 1 - 0.2/2; 0 - 0.2
    assert first.scores == {"math": 1.0, "length": -0.5}
    metrics = reward.settle()
    assert metrics["reward_term/math/mean"] == (1.0, 2) and metrics["reward_term/length/mean"] == (-1.5, 2)
    assert metrics["reward/gsm8k/mean"] == (pytest.approx(0.7), 2)
    assert metrics["reward/gsm8k/solved"] == (0, 2)
    assert metrics["reward_term/failures"] == (0, 1)
    assert reward.settle() == {"reward_term/failures": (0, 1)}  # of the time since the last call


def test_how_much_of_a_reward_the_environment_paid():
    environment = EnvironmentTerm("environment", "environment", weight=0.5), Fixed([1.0, 0.0])
    responses = [Response("a", paid=1.0), Response("b", paid=1.0, failure=Failure("error", "broke"))]
    judgements = judged(WeightedReward([term("math", [1.0, 1.0]), environment]), responses=responses)
    assert [worth.paid_weight for worth in judgements] == [0.5, 0.0]  # a failed episode keeps nothing of it
    assert judged(WeightedReward([term("math", [1.0, 1.0])]))[0].paid_weight == 0


def test_terms_judge_at_the_same_time_and_their_latency_is_told():
    class WaitsForTheOther(Fixed):
        async def score(self, prompt, responses):
            begun.add(self)
            while len(begun) < 2:
                await asyncio.sleep(0)
            return await super().score(prompt, responses)

    begun = set()
    terms = {"slow": WaitsForTheOther([1, 1], seconds=0.3), "quick": WaitsForTheOther([1, 1])}
    reward = WeightedReward([(Term(label, label), scorer) for label, scorer in terms.items()])
    started = time.monotonic()
    judged(reward)
    seconds, metrics = time.monotonic() - started, reward.settle()
    slow, quick = (metrics[f"reward_term/{label}/latency_s"] for label in terms)
    assert 0.3 <= slow[0] <= seconds and slow[0] - quick[0] > 0.1 and slow[1] == quick[1] == 1
    assert metrics["reward_term/quick/latency_max_s"][0] == quick[0]


def test_a_row_is_judged_by_the_terms_of_its_source():
    reward = WeightedReward(
        [
            term("math", [1, 1], sources=["gsm8k", "aime"]),
            term("code", [0.5, 0.5], sources=["mbpp"]),
            term("all", [0, 0]),
        ]
    )
    assert judged(reward)[0].scores == {"math": 1.0, "all": 0.0}
    assert judged(reward, Prompt(0, [1], "", "", "mbpp"))[0].scores == {"code": 0.5, "all": 0.0}
    assert judged(reward, Prompt(0, [1], "", "", "other"))[0].scores == {"all": 0.0}
    metrics = reward.settle()
    assert {name for name in metrics if name.startswith("reward/")} == {
        f"reward/{source}/{what}" for source in ("gsm8k", "mbpp", "other") for what in ("mean", "solved")
    }


def test_a_source_that_no_term_judges_is_told_before_anything_starts():
    served = [term("math", [1], sources=["gsm8k"])]
    WeightedReward(served).check_sources([PROMPT])
    stranger = Prompt(0, [1], "", "", "mbpp")
    WeightedReward([*served, term("all", [1])]).check_sources([stranger])
    with pytest.raises(RewardError, match="no reward term judges rows whose .* says 'mbpp'; known: gsm8k"):
        WeightedReward(served).check_sources([PROMPT, stranger])


@pytest.mark.parametrize(
    ("result", "kind", "reason"),
    [
        (ValueError("broken"), "error", "ValueError: broken"),
        ([math.nan, 1.0], "invalid", "nan instead of a finite number"),
        ([math.inf, 1.0], "invalid", "inf instead"),
        (["1.0", 1.0], "invalid", "'1.0' instead"),
        ([None, 1.0], "invalid", "None instead"),
        ([[1.0], 1.0], "invalid", "[1.0] instead"),
        ([1.0], "count", "1 scores for 2 responses"),
        ([1.0] * 3, "count", "3 scores for 2 responses"),
        ("1.0", "invalid", "returned str instead of a list"),
        (None, "invalid", "returned NoneType"),
        ([Failure("timeout", "5 s"), 1.0], "timeout", "5 s"),
    ],
)
def test_what_is_no_score_is_counted_logged_with_its_sample_and_worth_the_failure_score(result, kind, reason, tmp_path):
    log = tmp_path / "failures.jsonl"
    reward = WeightedReward(
        [term("bad", result, failure_score=-0.25), term("good", [1, 1])], max_failed_fraction=1.0, log=log
    )
    first, second = judged(reward)
    assert first.reward == 0.75 and first.scores == {"bad": -0.25, "good": 1.0}
    failed = 1 if second.scores["bad"] == 1.0 else 2
    metrics = reward.settle()
    assert metrics["reward_term/bad/failed_fraction"] == (failed, 2)
    assert metrics[f"reward_term/bad/failures_{kind}"] == (failed, 1)
    assert metrics["reward_term/failures"] == (failed, 1)
    assert metrics["reward_term/good/failed_fraction"] == (0, 2)
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(records) == failed and reason in records[0]["reason"]
    kept = {key: records[0][key] for key in ("term", "kind", "prompt", "response", "truth", "source")}
    assert kept == {
        "term": "bad", "kind": kind, "prompt": "question", "response": "a", "truth": "truth", "source": "gsm8k",
    }  # fmt: skip


def test_more_failures_than_allowed_end_the_run_with_the_reason():
    reward = WeightedReward([term("judge", [Failure("garbage", "no score in 'hm'"), 1.0])], max_failed_fraction=0.5)
    judged(reward)
    reward.settle()  # exactly half: allowed
    judged(reward, responses=RESPONSES)
    asyncio.run(WeightedReward.score(reward, PROMPT, RESPONSES))
    reward._terms[0][1].result = [Failure("timeout", "60 s")] * 2
    judged(reward)
    with pytest.raises(
        RewardError, match=r"judge failed on 4 of 6 .*2 garbage, 2 timeout; the last one: timeout: 60 s"
    ):
        reward.settle()


def test_an_error_that_ends_the_run_is_not_counted_away():
    with pytest.raises(RewardError, match="gone for good"):
        judged(WeightedReward([term("x", RewardError("gone for good"))]))


def test_of_many_failures_the_first_are_logged_and_all_are_counted(tmp_path):
    log = tmp_path / "failures.jsonl"
    number = MAX_LOGGED + 50
    reward = WeightedReward([term("x", ValueError("no"))], max_failed_fraction=1.0, log=log)
    judged(reward, responses=[Response(str(i)) for i in range(number)])
    assert len(log.read_text().splitlines()) == MAX_LOGGED
    assert reward.settle()["reward_term/failures"] == (number, 1)


def test_one_name_is_a_sum_of_one_term():
    reward = make_reward(RewardConfig(name="exact"), Setting())
    assert [j.reward for j in judged(reward, responses=[Response("truth"), Response("x")])] == [1.0, 0.0]
    assert asyncio.run(reward.start()) == []
    assert asyncio.run(WeightedReward([term("x", [1])]).start()) == ["reward x: here"]


def test_terms_of_a_config_with_labels_and_weights():
    written = [
        {"name": "exact", "weight": 2.0},
        {"name": "format", "label": "tags", "tags": ["answer"], "weight": -1},
        {"name": "length", "buffer_tokens": 10},
    ]
    reward = make_reward(RewardConfig(terms=written), Setting(max_response_length=20))
    responses = [Response("truth", 5), Response("<answer>x</answer>", 15)]
    first, second = judged(reward, responses=responses)
    assert (first.reward, first.scores) == (2.0, {"exact": 1.0, "tags": 0.0, "length": -0.0})
    assert (second.reward, second.scores) == (-1.5, {"exact": 0.0, "tags": 1.0, "length": -0.5})
