"""YAML and ``key=value`` overrides to a ``RunConfig``, with every problem reported at once.

Later layers win: the extended file, the file, the overrides. Within one layer two spellings of one knob must agree.
Imports nothing heavy: a bad config must be told within a second, before torch, CUDA or Ray are touched.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import Field, asdict, dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhf_mp.config.algorithm import ELSEWHERE
from rlhf_mp.config.checks import cross_problems, written_problems
from rlhf_mp.config.derive import derive
from rlhf_mp.config.keys import (
    KNOBS,
    SECTIONS,
    absent_reason,
    canonical,
    choices,
    describe,
    nearest,
    typed,
    without_none,
)
from rlhf_mp.config.knob import default_of
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.config.yaml_file import read_layers, read_override
from rlhf_mp.errors import ConfigError, Problem

IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""``package.module:function``"""

CHOICE_REASONS = {"actor_rollout_ref.rollout.name": "rlhf_mp samples with SGLang"}
"""Why a choice that people make elsewhere is not one here."""


@dataclass(frozen=True)
class Setting:
    """One value as somebody wrote it."""

    key: str
    spelling: str  # an alias of key, or key
    value: Any


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a run, complete and checked; files that it names are not looked at.

    Raises:
        ConfigError: with every problem of every layer.
    """
    config, problems = read_config(path, overrides)
    if problems:
        raise ConfigError(problems)
    return config


def config_from_dict(tree: dict[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """``load_config`` of a mapping that is already in memory.

    Raises:
        ConfigError: with every problem.
    """
    config, problems = check_layers([tree], overrides)
    if problems:
        raise ConfigError(problems)
    return config


def read_config(path: Path, overrides: Sequence[str] = ()) -> tuple[RunConfig, list[Problem]]:
    """The configuration with defaults where values were refused, and what was refused.

    Raises:
        ConfigError: a YAML file cannot be read, so nothing can be said about its values.
    """
    return check_layers(read_layers(path), overrides)


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    return asdict(config)


def dump_config(config: RunConfig, path: Path) -> None:
    """Write YAML that loads to an equal config."""
    path.write_text(config_to_yaml(config))


def config_to_yaml(config: RunConfig) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def check_layers(layers: Iterable[dict[Any, Any]], overrides: Sequence[str]) -> tuple[RunConfig, list[Problem]]:
    """Merge, type-check, derive and cross-check; a refused value leaves the default in its place."""
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    override_settings, override_problems = _read_overrides(overrides)
    for settings in [*map(flatten, layers), override_settings]:
        problems += _merge(values, settings)
    problems += override_problems
    node = deepcopy(_schema())
    for key, value in values.items():
        problems += _assign(node, key, value)
    config = OmegaConf.to_object(node)
    refused = {problem.key for problem in problems}
    problems += written_problems(config, values.keys())
    derive(config)
    problems += (problem for problem in cross_problems(config) if problem.key not in refused)
    return config, problems


@cache
def _schema() -> DictConfig:
    """Built once: that takes longer than all the rest of reading a config."""
    return OmegaConf.structured(RunConfig)


def flatten(tree: dict[Any, Any], prefix: str = "") -> Iterator[Setting | Problem]:
    """A nested mapping as settings of single knobs; whatever is no knob is a problem."""
    for name, value in tree.items():
        spelling = f"{prefix}{name}"
        key = canonical(spelling)
        if key in KNOBS:
            yield Setting(key, spelling, value)
        elif isinstance(value, dict) and value and absent_reason(key) is None:
            yield from flatten(value, f"{spelling}.")  # inside an unknown section, to name each key's real place
        elif key not in SECTIONS:
            yield _unknown(spelling, value)
        elif value:  # a section whose every line is commented out is None
            yield Problem(spelling, value, "is a section, not a value", f"{spelling}.<key>=<value>")


def _read_overrides(overrides: Sequence[str]) -> tuple[list[Setting | Problem], list[Problem]]:
    settings, problems = [], []
    for text in overrides:
        try:
            key, value = read_override(text)
        except ConfigError as error:
            problems += error.problems
            continue
        for name in reversed(key.split(".")):
            value = {name: value}
        settings += flatten(value)
    return settings, problems


def _merge(values: dict[str, Any], settings: Iterable[Setting | Problem]) -> Iterator[Problem]:
    """Lay one layer over ``values``, in place."""
    seen: dict[str, Setting] = {}
    for setting in settings:
        if isinstance(setting, Problem):
            yield setting
            continue
        other = seen.setdefault(setting.key, setting)
        if other.spelling != setting.spelling and other.value != setting.value:
            yield Problem(
                setting.spelling,
                setting.value,
                f"{other.spelling} = {other.value!r} says otherwise; both mean {setting.key}",
                f"keep only {setting.key}",
            )
        if isinstance(values.get(setting.key), dict) and isinstance(setting.value, dict):
            values[setting.key] |= setting.value  # engine_args: a layer adds to those below
        else:
            values[setting.key] = setting.value


def _unknown(spelling: str, value: Any) -> Problem:
    absent = absent_reason(spelling)
    if absent is not None:
        found = sorted(map(str, value)) if isinstance(value, dict) else value  # a section's names say enough
        return Problem(spelling, found, *absent)
    known = nearest(spelling)
    if known is None:
        return Problem(spelling, value, "unknown key", "remove it; docs/config.md lists every key")
    return Problem(spelling, value, f"unknown key; did you mean {known}?", typed(known, value))


def _assign(node: DictConfig, key: str, value: Any) -> Iterator[Problem]:
    """Set one knob, or say why not."""
    field = KNOBS[key]
    if isinstance(value, str) and get_origin(without_none(field.type)) is list:
        value = [value] if value else []  # train_files: a.jsonl
    if "${" in str(value):
        yield Problem(key, value, "values cannot refer to other keys", typed(key, "<the value itself>"))
        return
    try:
        OmegaConf.update(node, key, value, merge=False)
    except OmegaConfBaseException:
        yield _wrong_type(field, key, value)
        return
    for problem in (*range_problems(field, key, OmegaConf.select(node, key)), *name_problems(field, key, value)):
        OmegaConf.update(node, key, default_of(field), merge=False)
        yield problem


def _wrong_type(field: Field, key: str, value: Any) -> Problem:
    reason = f"must be {describe(field.type)}"
    allowed = choices(field.type)
    if allowed:
        if key in CHOICE_REASONS:
            reason += f"; {CHOICE_REASONS[key]}"
        candidates = value if isinstance(value, list) else [value]
        good = [match for item in candidates for match in get_close_matches(str(item), allowed, n=1)]
        example: Any = (good or [allowed[0]]) if isinstance(default_of(field), list) else (good or allowed)[0]
        return Problem(key, value, reason, typed(key, example))
    default = default_of(field)
    if default in (None, "", [], {}):
        return Problem(key, value, reason, f"{key}=<{describe(without_none(field.type))}>")
    return Problem(key, value, reason, f"a value such as the default: {typed(key, default)}")


def name_problems(field: Field, key: str, value: Any) -> Iterator[Problem]:
    """A name that is neither registered nor where a function of one's own can be."""
    names = field.metadata["names"]
    if not names or value in names or IMPORT_PATH.fullmatch(str(value)):
        return
    good = ELSEWHERE.get(value) or [*get_close_matches(str(value), names, n=1), default_of(field)][0]
    yield Problem(key, value, f"must be one of {', '.join(names)}, or package.module:function", typed(key, good))


def range_problems(field: Field, key: str, value: Any) -> Iterator[Problem]:
    """Violations of the field's own range; of a list, its first item out of range."""
    for number in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
        if not isinstance(number, int | float):
            continue
        reason, limit = _out_of_range(field, number)
        if reason:
            good = default_of(field) if number is not value or limit is None else limit
            fix = typed(key, good) if good is not None else "remove it; unset, it follows from other knobs"
            yield Problem(key, value if number is value else list(value), reason, fix)
            return


def _out_of_range(field: Field, number: float) -> tuple[str, float | None]:
    """Why ``number`` is refused ("": it is not) and the nearest number that is not, where there is one."""
    ge, gt, le = (field.metadata[limit] for limit in ("ge", "gt", "le"))
    if not math.isfinite(number):
        return "must be a finite number", None
    if ge is not None and number < ge:
        return f"must be at least {ge}", ge
    if gt is not None and number <= gt:
        return f"must be above {gt}", None
    if le is not None and number > le:
        return f"must be at most {le}", le
    return "", None
