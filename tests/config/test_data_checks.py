"""One test for each rule about data and validation, as in test_checks.py."""

import pytest

from rlhf_mp.config.load import config_from_dict

VAL, BEST = "data.val_files=v.jsonl", "trainer.best_metric=eval/x"
FREQ = "trainer.test_freq=5"
RULES = [  # words that break the rule, key of the problem, part of the reason, part of the fix, a word that mends it
    (
        ["data.truncation=left"],
        "data.truncation",
        "drops too long prompts",
        "data.filter_overlong_prompts=false",
        "data.filter_overlong_prompts=false",
    ),
    (
        ["data.curriculum_order=descending"],
        "data.curriculum_order",
        "no effect",
        "data.curriculum_key=<column>",
        "data.curriculum_key=level",
    ),
    (
        ["data.train_files=[a.jsonl,b.jsonl]", "data.train_weights=[1]"],
        "data.train_weights",
        "1 weight(s) for the 2 entries",
        "data.train_weights=[1,1]",
        "data.train_weights=[3,0.5]",
    ),
    (["trainer.best_mode=min", VAL], "trainer.best_mode", "no effect", "eval/<metric>", "trainer.best_metric=eval/x"),
    (["trainer.stop_at=0.9", FREQ, VAL], "trainer.stop_at", "no effect", "eval/<metric>", BEST),
    (["trainer.stop_at=0", BEST, VAL], "trainer.stop_at", "before the last step", "test_freq=10", FREQ),
    (
        ["trainer.best_metric=accuracy", VAL],
        "trainer.best_metric",
        "start with eval/",
        "trainer.best_metric=eval/accuracy",
        "trainer.best_metric=eval/accuracy",
    ),
    (["trainer.best_metric=eval/accuracy"], "trainer.best_metric", "nothing to validate on", "data.val_files", VAL),
]


@pytest.mark.parametrize(
    ("words", "key", "reason", "fix", "cure"), RULES, ids=lambda x: x if isinstance(x, str) else ""
)
def test_a_broken_rule_names_key_reason_and_fix_and_can_be_mended(problems_of, words, key, reason, fix, cure):
    problem = problems_of(*words)[key]
    assert reason in problem.reason
    assert fix in problem.fix
    assert key not in problems_of(*words, cure)


def test_weights_are_positive(problems_of):
    assert "above 0" in problems_of("data.train_files=[a,b]", "data.train_weights=[1,0]")["data.train_weights"].reason


def test_tables_are_kept_in_the_run_directory_unless_another_place_is_named():
    assert config_from_dict({"trainer": {"default_local_dir": "out"}}).data.cache_dir == "out/prompts"
    assert config_from_dict({"data": {"cache_dir": "elsewhere"}}).data.cache_dir == "elsewhere"
