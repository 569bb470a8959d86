"""Rules of the reward's terms, each named by its place: ``reward.terms[1].pattern``."""

import re
import string
from collections.abc import Iterator
from dataclasses import Field, fields
from difflib import get_close_matches
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhf_mp.config.keys import choices, describe
from rlhf_mp.config.knob import default_of
from rlhf_mp.config.reward import (
    KINDS,
    EndpointTerm,
    EnvironmentTerm,
    FunctionTerm,
    JudgeTerm,
    LengthTerm,
    RegexTerm,
    RemoteTerm,
    RewardConfig,
    Term,
    kind_of,
)
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.errors import Problem

FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
NEEDED = {"regex": ("pattern",), "judge": ("base_url", "model"), "remote": ("url",)}


def written_reward_problems(reward: RewardConfig) -> Iterator[Problem]:
    """One way of writing the reward makes the other one's knobs meaningless."""
    for name in ("name", "timeout_s"):
        value = getattr(reward, name)
        if reward.terms and value != getattr(RewardConfig(), name):
            fix = f"remove it, or reward.{name}={getattr(RewardConfig(), name)}, the default; terms have their own"
            yield Problem(f"reward.{name}", value, "no effect with reward.terms", fix)


def reward_problems(config: RunConfig) -> Iterator[Problem]:
    """Everything wrong with the terms that can be told without starting them."""
    terms: list[tuple[str, Term]] = []
    for place, written in _written_terms(config):
        found, problems = parse(place, written)
        yield from problems
        if found is not None and not problems:
            terms.append((place, found))
    yield from _label_problems(terms)
    for place, term in terms:
        yield from _term_problems(place, term)
        yield from _context_problems(place, term, config)


def _written_terms(config: RunConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    if not config.reward.terms:
        yield "reward", {"name": config.reward.name}
    for number, written in enumerate(config.reward.terms):
        yield f"reward.terms[{number}]", written


def parse(place: str, written: dict[str, Any]) -> tuple[Term | None, list[Problem]]:
    """One written term as what it says, with what is wrong with its keys and values."""
    name = written.get("name")
    kind = kind_of(name) if isinstance(name, str) else None
    known = ", ".join(sorted(KINDS))
    if kind is None:
        close = get_close_matches(str(name), KINDS, n=1)
        reason = f"must be one of {known}, or package.module:function"
        return None, [Problem(f"{place}.name", name, reason, f"{place}.name={close[0] if close else 'math'}")]
    if kind is FunctionTerm and not FUNCTION.fullmatch(name):
        reason, fix = "must be package.module:function", f"{place}.name=my_rewards:score"
        return None, [Problem(f"{place}.name", name, reason, fix)]
    knobs = {field.name: field for field in fields(kind)}
    node, problems = OmegaConf.structured(kind), []
    for key, value in written.items():
        if key not in knobs:
            close = get_close_matches(key, knobs, n=1)
            fix = f"{close[0]}: {value}" if close else f"remove it; {name} has {', '.join(knobs)}"
            problems.append(Problem(f"{place}.{key}", value, f"{name} has no such key", fix))
        elif reason := _refused(node, knobs[key], value):
            problems.append(
                Problem(f"{place}.{key}", value, reason, f"such as the default: {default_of(knobs[key])!r}")
            )
    return OmegaConf.to_object(node), problems


def _refused(node: Any, field: Field, value: Any) -> str:
    """Why a value is refused; empty: it is not, and it is set."""
    try:
        OmegaConf.update(node, field.name, value, merge=False)
    except OmegaConfBaseException:
        allowed = choices(field.type)
        return f"must be one of {', '.join(allowed)}" if allowed else f"must be {describe(field.type)}"
    found = getattr(node, field.name)
    limits = (("ge", "at least", lambda x, y: x >= y), ("gt", "above", lambda x, y: x > y))
    for name, words, holds in (*limits, ("le", "at most", lambda x, y: x <= y)):
        limit = field.metadata[name]
        if limit is not None and not holds(found, limit):
            return f"must be {words} {limit}"
    return ""


def _label_problems(terms: list[tuple[str, Term]]) -> Iterator[Problem]:
    seen: dict[str, str] = {}
    for place, term in terms:
        label = term.label or term.name
        if label in seen:
            reason = f"{seen[label]} is called so too, and metrics go by this name"
            yield Problem(f"{place}.label", label, reason, f"label: {label}_2")
        seen.setdefault(label, place)


def _term_problems(place: str, term: Term) -> Iterator[Problem]:
    for key in NEEDED.get(term.name, ()):
        if not getattr(term, key):
            fix = f"reward.terms=[{{name: {term.name}, {key}: ...}}]"
            yield Problem(f"{place}.{key}", "", f"{term.name} needs it", fix)
    if term.weight == 0:
        yield Problem(f"{place}.weight", 0, "a term of weight 0 is judged for nothing", "weight: 1, or remove the term")
    if isinstance(term, RegexTerm):
        yield from _pattern_problems(f"{place}.pattern", term.pattern.replace("{answer}", "x"), groups=False)
    if isinstance(term, EndpointTerm):
        url_key = "base_url" if isinstance(term, JudgeTerm) else "url"
        url = term.base_url if isinstance(term, JudgeTerm) else term.url if isinstance(term, RemoteTerm) else ""
        if url and not url.startswith(("http://", "https://")):
            yield Problem(f"{place}.{url_key}", url, "must start with http:// or https://", f"{url_key}: http://{url}")
    if isinstance(term, JudgeTerm):
        yield from _judge_problems(place, term)


def _pattern_problems(place: str, pattern: str, *, groups: bool) -> Iterator[Problem]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        yield Problem(place, pattern, f"no regular expression: {error}", "correct it; see Python's module re")
        return
    if groups and compiled.groups != 1:
        yield Problem(place, pattern, "needs exactly one group, the score", r"score_pattern: 'Score:\s*(\d+)'")


def _judge_problems(place: str, term: JudgeTerm) -> Iterator[Problem]:
    yield from _pattern_problems(f"{place}.score_pattern", term.score_pattern, groups=True)
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(term.template) if name is not None}
    except ValueError as error:
        yield Problem(f"{place}.template", term.template[:60], f"{error}", "write {{ and }} for braces of its own")
        return
    if unknown := names - {"question", "answer", "response"}:
        reason = f"{{{sorted(unknown)[0]}}} is none of {{question}}, {{answer}} and {{response}}"
        yield Problem(f"{place}.template", term.template[:60], reason, "write {{ and }} for braces of its own")
    if "response" not in names:
        reason = "{response} is missing: the judge would not see what it judges"
        yield Problem(f"{place}.template", term.template[:60], reason, "put {response} into it")
    if term.votes > 1 and term.temperature == 0:
        reason = f"its {term.votes} votes would all be the same"
        yield Problem(f"{place}.temperature", 0.0, reason, "temperature: 0.7, or votes: 1")


def _context_problems(place: str, term: Term, config: RunConfig) -> Iterator[Problem]:
    """Terms that need something of the rest of the config."""
    multi_turn, data = config.actor_rollout_ref.rollout.multi_turn, config.data
    if isinstance(term, EnvironmentTerm) and not multi_turn.enable:
        reason = "there is no environment: actor_rollout_ref.rollout.multi_turn.enable=false"
        yield Problem(f"{place}.name", term.name, reason, "actor_rollout_ref.rollout.multi_turn.enable=true")
    if term.sources and not data.reward_fn_key:
        reason = "rows have no source without data.reward_fn_key"
        yield Problem(f"{place}.sources", term.sources, reason, "data.reward_fn_key=data_source")
    longest = data.max_response_length
    if isinstance(term, LengthTerm) and (term.max_tokens or longest) <= term.buffer_tokens:
        reason = f"the score would fall before the first token, with max_tokens = {term.max_tokens or longest}"
        yield Problem(f"{place}.buffer_tokens", term.buffer_tokens, reason, "a smaller buffer_tokens")
