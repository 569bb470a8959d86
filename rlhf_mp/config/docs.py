"""The reference of all knobs: ``python -m rlhf_mp.config.docs > docs/config.md``."""

import json
from dataclasses import Field
from typing import Any

from rlhf_mp.config.keys import ALIASES, KNOBS, SECTIONS, choices, describe, without_none
from rlhf_mp.config.knob import default_of

INTRODUCTION = """# Configuration

Every knob, made by `python -m rlhf_mp.config.docs > docs/config.md` from `rlhf_mp/config/schema.py` and `algorithm.py`.

A run is configured by one YAML file, which may start from another with `extends: other.yaml` (relative to itself),
and by `key=value` words on the command line, e.g. `actor_rollout_ref.rollout.n=16`. Later ones win: the extended file,
the file, the words. Lists are written `[a,b]`, nothing is `null`. A knob whose default is *unset* follows from others
as its description says; `--check` prints what it became.

    python launch/train.py --config configs/quickstart.yaml --check
"""


def render() -> str:
    """The whole page as Markdown."""
    parts = [INTRODUCTION, "## Accepted spellings", ""]
    parts += [f"- `{alias}` is read as `{key}`" for alias, key in ALIASES.items()]
    for section, field in SECTIONS.items():
        own = {key: f for key, f in KNOBS.items() if key.rpartition(".")[0] == section}
        if own:
            parts += ["", f"## {section}", "", field.metadata["help"], ""]
            parts += ["| key | default | meaning | allowed |", "|---|---|---|---|"]
            parts += [_row(key, f) for key, f in own.items()]
    return "\n".join(parts) + "\n"


def _row(key: str, field: Field) -> str:
    cells = [f"`{key.rpartition('.')[2]}`", _default(default_of(field)), field.metadata["help"], allowed(field)]
    return "| " + " | ".join(cells) + " |"


def _default(value: Any) -> str:
    if value is None:
        return "*unset*"
    return f"`{value}`" if isinstance(value, str) and value else f"`{json.dumps(value)}`"


def allowed(field: Field) -> str:
    """Type, choices and range of a knob in words."""
    if field.metadata["names"]:
        return ", ".join(f"`{name}`" for name in field.metadata["names"]) + ", or `package.module:function`"
    if choices(field.type):
        return ", ".join(f"`{choice}`" for choice in choices(field.type))
    limits = (("ge", "at least"), ("gt", "above"), ("le", "at most"))
    words = [f"{word} {field.metadata[name]}" for name, word in limits if field.metadata[name] is not None]
    return " ".join([describe(without_none(field.type)), *words])


if __name__ == "__main__":
    print(render(), end="")
