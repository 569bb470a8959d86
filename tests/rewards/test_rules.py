import asyncio

import pytest

from rlhf_mp.config.reward import EnvironmentTerm, ExactTerm, FormatTerm, LengthTerm, RegexTerm
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.rewards.base import Failure, Response, Setting
from rlhf_mp.rewards.registered import rewards


def score(term, responses, answer="", setting=Setting()):
    """Scores, or the kinds of failures."""
    reward = rewards[term.name](term, setting)

    async def run():
        assert await reward.start() == ""
        found = await reward.score(Prompt(0, [1], "?", answer), responses)
        await reward.close()
        return [score.kind if isinstance(score, Failure) else score for score in found]

    return asyncio.run(run())


def texts(*responses):
    return [Response(text) for text in responses]


def test_only_the_reference_answer_counts_apart_from_white_space_around_it():
    responses = texts("two words", "\ttwo words ", "two  words", "")
    assert score(ExactTerm("exact"), responses, " two words\n") == [1.0, 1.0, 0.0, 0.0]


def test_an_unknown_reward_is_answered_with_the_known_ones():
    with pytest.raises(KeyError, match="no reward named 'maths'; known: code, environment, exact"):
        rewards["maths"]


def test_what_the_environment_paid_is_its_score():
    assert score(EnvironmentTerm("environment"), [Response("x", paid=0.75), Response("x")]) == [0.75, 0.0]


@pytest.mark.parametrize(
    ("text", "worth"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" <think>a\n</think>\n\n<answer>b</answer> done", 1.0),
        ("<think>a</think>text<answer>b</answer>", 0.0),
        ("before <think>a</think><answer>b</answer>", 0.0),
        ("<think> </think><answer>b</answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>a<think></think></think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("", 0.0),
    ],
)
def test_a_format_is_its_tags_once_each_in_order_with_something_inside(text, worth):
    assert score(FormatTerm("format"), texts(text)) == [worth]


def test_overlong_responses_lose_by_hand():
    # arXiv:2503.14476 eq. 13, L_max 100, L_cache 20: 0 to 80, then (80 - |y|) / 20, then -1
    lengths = {0: 0.0, 80: 0.0, 85: -0.25, 95: -0.75, 100: -1.0, 140: -1.0}
    responses = [Response("", num_tokens=n) for n in lengths]
    wanted = list(lengths.values())
    assert score(LengthTerm("length", max_tokens=100, buffer_tokens=20), responses) == wanted
    setting = Setting(max_response_length=100)
    assert score(LengthTerm("length", buffer_tokens=20), responses, setting=setting) == wanted


def test_a_pattern_is_searched_and_the_answer_in_it_is_taken_literally():
    term = RegexTerm("regex", pattern=r"(?i)answer: {answer}$")
    assert score(term, texts("the ANSWER: a.c", "answer: abc", "answer: a.c!"), answer="a.c") == [1.0, 0.0, 0.0]


def test_a_pattern_that_backtracks_for_ever_is_a_failure_of_that_response_alone():
    term = RegexTerm("regex", pattern="(a+)+$", timeout_s=0.5)
    assert score(term, texts("aa", "a" * 40 + "b", "ba")) == [1.0, "timeout", 1.0]
