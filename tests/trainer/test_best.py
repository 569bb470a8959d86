"""Which validation counts as the best."""

import math

import pytest

from rlhf_mp.errors import ConfigError
from rlhf_mp.trainer.best import Best


def best_of(mode, values, start=1):
    best = Best("eval/x", mode)
    better = [best.offer(step, {"eval/x": value}) for step, value in enumerate(values, start)]
    return better, best.value, best.step


def test_more_or_less_is_better_as_configured_and_of_equals_the_first():
    values = [0.3, 0.5, 0.5, 0.2, 0.6]
    assert best_of("max", values) == ([True, True, False, False, True], 0.6, 5)
    assert best_of("min", values) == ([True, False, False, True, False], 0.2, 4)


def test_the_untrained_model_is_not_the_best_checkpoint():
    assert best_of("max", [0.9, 0.1], start=0) == ([False, True], 0.1, 1)


def test_nan_is_never_the_best():
    assert best_of("max", [math.nan, 0.1, math.nan]) == ([False, True, False], 0.1, 2)
    assert best_of("min", [math.nan]) == ([False], None, None)


@pytest.mark.parametrize(("mode", "values"), [("max", [0.8, math.nan, 0.9, 0.1]), ("min", [1.0, math.nan, 0.9, 2.0])])
def test_a_run_ends_once_the_best_is_good_enough(mode, values):
    ends, never = Best("eval/x", mode, stop_at=0.9), Best("eval/x", mode)
    found = []
    for step, value in enumerate(values, 1):
        for best in (ends, never):
            best.offer(step, {"eval/x": value})
        found.append(ends.good_enough)
    assert found == [False, False, True, True] and not never.good_enough
    resumed = Best("eval/x", mode, stop_at=0.9)
    assert not resumed.good_enough
    resumed.load_state_dict(ends.state_dict())
    assert resumed.good_enough


def test_an_unknown_metric_is_told_with_those_there_are():
    with pytest.raises(ConfigError, match="it has: eval/accuracy, eval/pass@4"):
        Best("eval/pass@8", "max").offer(0, {"eval/accuracy": 1.0, "eval/pass@4": 1.0, "time/eval_s": 2.0})
