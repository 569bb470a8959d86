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


def test_an_unknown_metric_is_told_with_those_there_are():
    with pytest.raises(ConfigError, match="it has: eval/accuracy, eval/pass@4"):
        Best("eval/pass@8", "max").offer(0, {"eval/accuracy": 1.0, "eval/pass@4": 1.0, "time/eval_s": 2.0})
