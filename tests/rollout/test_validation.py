"""Validation's numbers: by hand, and against drawing all subsets."""

from itertools import combinations, permutations

import pytest

from rlhf_mp.rewards.vote import vote
from rlhf_mp.rollout.validation import Judged, file_names, majority_solved, pass_at_k, validation_metrics


@pytest.mark.parametrize("num_responses", range(1, 8))
def test_pass_at_k_is_the_share_of_all_subsets_with_a_right_response(num_responses):
    for num_solved in range(num_responses + 1):
        solved = [i < num_solved for i in range(num_responses)]
        for k in range(1, num_responses + 1):
            subsets = [any(chosen) for chosen in combinations(solved, k)]
            assert pass_at_k(num_responses, num_solved, k) == pytest.approx(sum(subsets) / len(subsets))


def test_pass_at_k_of_many_responses_neither_overflows_nor_leaves_the_unit_interval():
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)
    assert pass_at_k(10_000, 0, 10_000) == 0.0
    assert pass_at_k(10_000, 5_001, 5_000) == 1.0


def group(*responses):
    return [Judged(float(reward), 3, answer) for answer, reward in responses]


def test_the_majority_decides():
    assert majority_solved(group(("7", 1), ("7", 1), ("8", 0))) == 1
    assert majority_solved(group(("7", 1), ("8", 0), ("8", 0))) == 0
    assert majority_solved(group(("7", 1), ("7", 0), ("8", 0))) == 0.5  # voted together, judged apart


def test_equally_many_votes_count_by_halves_whatever_the_order():
    responses = [("7", 1), ("7", 1), ("8", 0), ("8", 0), ("9", 0)]
    assert {majority_solved(group(*order)) for order in permutations(responses)} == {0.5}


def test_all_metrics_by_hand():
    easy = [group(("7", 1), ("7", 1), ("7", 1), ("8", 0)), group(("1", 0), ("1", 0), ("2", 1), ("3", 0.5))]
    hard = [group(("1", 0), ("2", 0), ("3", 0), ("4", 0))]
    metrics = validation_metrics({"easy": easy, "hard": hard})
    assert set(metrics) == {
        f"{file}{name}"
        for file in ("", "easy/", "hard/")
        for name in ("accuracy", "reward_mean", "response_length_mean", "pass@2", "pass@4", "mean@4", "maj@4")
    }
    assert metrics["accuracy"] == (4, 12) and metrics["easy/accuracy"] == (4, 8) and metrics["hard/accuracy"] == (0, 4)
    assert metrics["easy/reward_mean"] == (4.5, 8)
    # pass@2: 3 of 4 right: 1 - C(1,2)/C(4,2) = 1; 1 of 4: 1 - C(3,2)/C(4,2) = 1 - 3/6
    assert metrics["easy/pass@2"] == pytest.approx((1.5, 2))
    assert metrics["pass@4"] == pytest.approx((2.0, 3))
    assert metrics["easy/mean@4"] == pytest.approx((3 / 4 + 1.5 / 4, 2))
    assert metrics["easy/maj@4"] == (1.0, 2)  # "7" is right, "1" is not
    assert metrics["maj@4"] == (1.0, 3)


def test_a_single_file_with_one_response_each_has_the_plain_metrics_alone():
    metrics = validation_metrics({"test": [group(("7", 1)), group(("8", 0))]})
    assert metrics == {"accuracy": (1, 2), "reward_mean": (1.0, 2), "response_length_mean": (6, 2)}


def test_k_goes_by_doubling_up_to_n():
    metrics = validation_metrics({"test": [group(*[("7", 1)] * 6)]})
    assert [name for name in metrics if "@" in name] == ["pass@2", "pass@4", "pass@6", "mean@6", "maj@6"]


def test_files_have_short_names_that_differ():
    assert file_names(["data/gsm8k.jsonl", "data/math.parquet"]) == ["gsm8k", "math"]
    assert file_names(["gsm8k/test.jsonl", "math/test.jsonl", "x/aime.jsonl"]) == ["gsm8k/test", "math/test", "aime"]
    assert file_names(["a/test.jsonl", "a/test.jsonl"]) == ["test_1", "test_2"]
    assert file_names([]) == []


@pytest.mark.parametrize(
    "response, answer",
    [
        (r"so \boxed{1,234}, not 7", "1234"),
        ("#### 42\n", "42"),
        ("It costs $1,200.50.", "1200.50"),
        ("first 3, then -4", "-4"),
        ("\\boxed{ \\frac{1}{2} }", "\\frac{1}{2}"),
        ("no number at all", "nonumberatall"),
        ("", ""),
    ],
)
def test_what_a_response_votes_for(response, answer):
    assert vote(response) == answer
