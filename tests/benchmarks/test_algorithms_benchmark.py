"""What the table of algorithms says, from records as a run writes them."""

from benchmarks.algorithms import ALGORITHMS, CONFIG, ROOT, summarize, table
from rlhf_mp.config.load import load_config

RECORDS = [
    {"step": 0, "eval/accuracy": 0.3, "time/eval_s": 9.0},
    {"step": 1, "time/step_s": 2.0, "rollout/reward_mean": 0.2},
    {"step": 2, "time/step_s": 1.0, "rollout/reward_mean": 0.5},
    {"step": 2, "eval/accuracy": 0.92, "time/eval_s": 9.0},
    {"step": 3, "time/step_s": 3.0, "rollout/reward_mean": 0.6},
    {"step": 3, "eval/accuracy": 0.85, "time/eval_s": 9.0},
]


def test_the_first_validation_that_is_good_enough_counts_and_validations_take_no_time():
    found = summarize(RECORDS, 0.9)
    assert (found["steps_to_accuracy"], found["seconds_to_accuracy"]) == (2, 3.0)
    assert (found["steps"], found["seconds"], found["seconds_per_step"]) == (3, 6.0, 2.0)
    assert (found["accuracy_first"], found["accuracy_last"]) == (0.3, 0.85)
    assert (found["reward_first"], found["reward_last"]) == (0.2, 0.6)


def test_what_was_not_reached_is_said_so():
    found = summarize(RECORDS, 0.95)
    assert found["steps_to_accuracy"] is found["seconds_to_accuracy"] is None
    assert "| grpo | not yet | - | 2.00 | 0.300 | 0.850 | 3 |" in table({"grpo": found}, 0.95)


def test_the_words_of_every_algorithm_are_a_config():
    for words in ALGORITHMS.values():
        load_config(ROOT / CONFIG, words.split())
