"""Prompts that were drawn and not used come again; by hand. Properties are in tests/cluster/test_async.py."""

from rlhf_mp.data.feed import PromptFeed
from rlhf_mp.data.order import PromptOrder


def feed() -> PromptFeed:
    return PromptFeed(PromptOrder(8, 4, seed=0, shuffle=False), max_ahead=1)


def indices(drawn) -> list[int]:
    return [one.index for one in drawn]


def test_what_was_not_used_is_the_first_of_the_next_draw():
    made = feed()
    drawn = made.draw(0, 6)
    assert indices(drawn) == [0, 1, 2, 3, 4, 5]
    made.settle(0, drawn, [0, 1, 3, 5])
    assert made.state_dict(1) == made.order.state_dict() | {"returned": [[0, 2], [0, 4], [0, 6], [0, 7]]}
    assert indices(made.draw(1, 6)) == [2, 4, 6, 7, 0, 1]  # the second epoch begins


def test_a_step_drawn_ahead_changes_nothing_for_those_before_it():
    made = feed()
    first = made.draw(0, 4)
    second = made.draw(1, 4)
    made.settle(1, second, [0, 1, 2, 3])  # the later step ends first
    made.settle(0, first, [0, 1, 2, 3])
    fresh = feed()
    fresh.settle(0, fresh.draw(0, 4), [0, 1, 2, 3])
    assert made.state_dict(1) == fresh.state_dict(1)

    resumed = feed()
    resumed.load_state_dict(made.state_dict(1))
    assert indices(resumed.draw(1, 4)) == [4, 5, 6, 7]


def test_a_returned_prompt_that_a_later_step_uses_is_still_returned_to_a_run_resumed_before_that_step():
    made = feed()
    first = made.draw(0, 5)
    made.settle(0, first, [0, 1, 2, 4])  # 3 comes again
    second = made.draw(1, 4)
    assert indices(second) == [3, 5, 6, 7]
    made.settle(1, second, [0, 1, 2, 3])
    assert made.state_dict(1)["returned"] == [[0, 3], [0, 5], [0, 6], [0, 7]]
    assert "returned" not in made.state_dict(2)


def test_old_steps_are_forgotten():
    made = feed()
    for step in range(9):
        made.settle(step, made.draw(step, 4), range(4))
        made.forget(step - 1)
    assert len(made._steps) <= 4 and len(made._unused) == 0
