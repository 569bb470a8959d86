"""Every rule of terms and episodes, by a config that breaks it."""

import pytest

from rlhf_mp.config.load import check_layers, config_from_dict, config_to_yaml
from rlhf_mp.config.reward import JudgeTerm, MathTerm, terms_of

BASE = {
    "actor_rollout_ref": {"model": {"path": "models/m"}},
    "data": {"train_files": "train.jsonl"},
    "trainer": {"device": "cpu"},
}
JUDGE = "name: judge, base_url: 'http://x/v1', model: m"
MULTI = "actor_rollout_ref.rollout.multi_turn"


def problems(*overrides):
    return {p.key: p for p in check_layers([BASE], overrides)[1]}


@pytest.mark.parametrize(
    ("written", "key", "reason"),
    [
        ("{name: mth}", "name", "must be one of code, environment"),
        ("{weight: 1}", "name", "must be one of"),
        ("{name: '3x:f'}", "name", "package.module:function"),
        ("{name: math, tmeout_s: 3}", "tmeout_s", "math has no such key"),
        ("{name: math, timeout_s: soon}", "timeout_s", "must be a number"),
        ("{name: math, timeout_s: 0}", "timeout_s", "must be above 0"),
        ("{name: math, num_workers: 0}", "num_workers", "must be at least 1"),
        ("{name: math, weight: 0}", "weight", "judged for nothing"),
        ("{name: code, isolation: hope}", "isolation", "must be one of namespaces, rlimits"),
        ("{name: regex}", "pattern", "regex needs it"),
        ("{name: regex, pattern: '(a'}", "pattern", "no regular expression"),
        ("{name: remote}", "url", "remote needs it"),
        ("{name: remote, url: 'localhost:80'}", "url", "must start with http://"),
        ("{name: judge, model: m}", "base_url", "judge needs it"),
        ("{" + JUDGE + ", score_pattern: 'Score'}", "score_pattern", "exactly one group"),
        ("{" + JUDGE + ", template: 'is {answer} good?'}", "template", "{response} is missing"),
        ("{" + JUDGE + ", template: '{response} {truth}'}", "template", "{truth} is none of"),
        ("{" + JUDGE + ", template: '{response'}", "template", "expected '}'"),
        ("{" + JUDGE + ", votes: 3}", "temperature", "3 votes would all be the same"),
        ("{name: environment}", "name", "there is no environment"),
        ("{name: math, sources: [a]}", "sources", "rows have no source without data.reward_fn_key"),
        ("{name: length, buffer_tokens: 512}", "buffer_tokens", "fall before the first token"),
    ],
)
def test_a_bad_term_is_named_by_its_place(written, key, reason):
    found = problems(f"reward.terms=[{{name: exact}}, {written}]")
    assert list(found) == [f"reward.terms[1].{key}"]
    assert reason in found[f"reward.terms[1].{key}"].reason


def test_two_terms_of_one_name_need_labels():
    assert "reward.terms[1].label" in problems("reward.terms=[{name: math}, {name: math, weight: 2}]")
    assert problems("reward.terms=[{name: math}, {name: math, label: other}]") == {}


def test_one_term_by_name_must_do_without_arguments():
    assert set(problems("reward.name=judge")) == {"reward.base_url", "reward.model"}
    assert problems("reward.name=my_rewards:score") == {}


def test_both_spellings_at_once_are_a_contradiction():
    found = problems("reward.terms=[{name: math}]", "reward.name=exact", "reward.timeout_s=1")
    assert set(found) == {"reward.name", "reward.timeout_s"}


def test_the_terms_of_a_good_config_come_out_as_written_and_survive_a_dump(tmp_path):
    written = f"reward.terms=[{{name: math, weight: 0.8, timeout_s: 2}}, {{{JUDGE}, label: evaluator, weight: 0.2}}]"
    config = config_from_dict(BASE, [written])
    math, judge = terms_of(config.reward)
    assert (type(math), math.weight, math.timeout_s, math.label) == (MathTerm, 0.8, 2, "math")
    assert (type(judge), judge.label, judge.model) == (JudgeTerm, "evaluator", "m")
    import yaml

    again = config_from_dict(yaml.safe_load(config_to_yaml(config)))
    assert again == config


@pytest.mark.parametrize(
    ("written", "key", "reason"),
    [
        (["max_assistant_turns=3"], "max_assistant_turns", "no effect"),
        (["environment=guess"], "environment", "no effect"),
        (["enable=true", "environment=chess"], "environment", "must be one of calculator, guess"),
        (["enable=true", "max_tokens_per_turn=600"], "max_tokens_per_turn", "the whole episode has"),
        (["enable=true", "max_tool_response_length=512"], "max_tool_response_length", "may fill the whole"),
        (["enable=true", "tool_timeout_s=9", "episode_timeout_s=5"], "tool_timeout_s", "longer than"),
    ],
)
def test_limits_of_episodes(written, key, reason):
    found = problems(*(f"{MULTI}.{word}" for word in written))
    assert list(found) == [f"{MULTI}.{key}"] and reason in found[f"{MULTI}.{key}"].reason
