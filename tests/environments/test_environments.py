import asyncio

import pytest

from rlhf_mp.config.multi_turn import ENVIRONMENTS
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.environments.base import Turn
from rlhf_mp.environments.calculator import worked_out
from rlhf_mp.environments.registered import environment_maker, environments


def played(name, answer, *turns, **args):
    environment = environment_maker(name, args)()

    async def run():
        assert await environment.reset(Prompt(0, [1], "?", answer)) == ""
        return [await environment.step(turn) for turn in turns]

    return asyncio.run(run())


def test_a_guess_is_answered_by_the_direction_and_found_by_the_number():
    assert played("guess", "07", "03", "11 ", "07") == [Turn(">"), Turn("<"), Turn(reward=1.0, done=True)]


def test_a_guess_that_earlier_answers_exclude_costs():
    answers = played("guess", "07", "03", "03", "11", "13", "02", "06", "10", penalty=0.5)
    assert [turn.reward for turn in answers] == [0, -0.5, 0, -0.5, -0.5, 0, 0]
    assert [turn.observation for turn in answers] == [">", ">", "<", "<", ">", ">", "<"]


@pytest.mark.parametrize("said", ["", "a", "-1", "1.5", "٣"])
def test_what_is_no_guess_costs(said):
    assert played("guess", "07", said, penalty=0.5) == [Turn("!", reward=-0.5)]


def test_the_calculator_works_out_what_is_asked_and_any_other_turn_is_the_answer():
    assert played("calculator", "1215", "?27*45", "1215") == [Turn("=1215;"), Turn(reward=1.0, done=True)]
    assert played("calculator", "1215", "1251") == [Turn(reward=0.0, done=True)]


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("27*45", "1215"), ("2-3*4", "-10"), ("-(1+2)", "-3"), ("", "!"), ("2**9999999", "!"), ("1/2", "!"),
        ("__import__('os')", "!"), ("1+", "!"), ("9" * 70, "!"), ("(" * 60, "!"), ("1.5", "!"), ("True", "!"),
    ],
)  # fmt: skip
def test_only_sums_differences_and_products_of_whole_numbers(expression, result):
    assert worked_out(expression) == result


def test_the_registered_environments_are_those_a_config_may_name():
    assert list(environments) == sorted(ENVIRONMENTS)


def test_a_class_of_ones_own_is_found_and_its_arguments_are_checked():
    environment = environment_maker("rlhf_mp.environments.guess:Guess", {"penalty": 0.3})()
    assert environment._penalty == 0.3
    with pytest.raises(TypeError, match="fine"):
        environment_maker("guess", {"fine": 1})
    with pytest.raises(AttributeError):
        environment_maker("rlhf_mp.environments.guess:Chess", {})
