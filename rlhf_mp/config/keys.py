"""The dotted keys of the schema, as typed on the command line, and the key that a misspelt one probably meant."""

import json
import types
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from difflib import SequenceMatcher
from typing import Any, Literal, Union, get_args, get_origin

from rlhf_mp.config.schema import RunConfig

ALIASES = {
    "actor_rollout_ref.actor.learning_rate": "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.model.override_config.attn_implementation": "actor_rollout_ref.model.attn_implementation",
    "actor_rollout_ref.model.fsdp_config": "actor_rollout_ref.actor.fsdp_config",
    "critic.learning_rate": "critic.optim.lr",
    "critic.model.fsdp_config": "critic.fsdp_config",
}
"""Spellings accepted in a file or override. Loading folds them into the canonical place; nothing later knows them."""

FAMILIAR = {
    "clip_epsilon": "actor_rollout_ref.actor.clip_ratio",
    "kl_coef": "actor_rollout_ref.actor.kl_loss_coef",
    "lora_r": "actor_rollout_ref.model.lora_rank",
    "lora_target_modules": "actor_rollout_ref.model.target_modules",
    "max_grad_norm": "actor_rollout_ref.actor.grad_clip",
    "model_dtype": "actor_rollout_ref.model.dtype",
    "model_path": "actor_rollout_ref.model.path",
    "num_generations": "actor_rollout_ref.rollout.n",
    "output_dir": "trainer.default_local_dir",
    "tensor_parallel_size": "actor_rollout_ref.rollout.tensor_model_parallel_size",
}
"""Last names of keys in other trainers whose spelling would not lead to ours."""

ABSENT = {
    "critic.ppo_mini_batch_size": ("the critic is stepped with the actor's mini-batches", "remove it"),
    "critic.use_dynamic_bsz": ("micro-batches are cut as the actor's are", "actor_rollout_ref.actor.use_dynamic_bsz"),
    "actor_rollout_ref.rollout.mode": ("engines are always servers", "remove it"),
    "use_4bit": ("the frozen base of LoRA can be held in 4 bits", "actor_rollout_ref.model.quantization=nf4"),
    "use_8bit": ("the frozen base of LoRA can be held in 8 bits", "actor_rollout_ref.model.quantization=int8"),
    "use_lora": ("LoRA is on where its rank is above 0", "actor_rollout_ref.model.lora_rank=16"),
    "actor_rollout_ref.rollout.load_format": ("engines start from actor_rollout_ref.model.path", "remove it"),
}
"""Keys (or sections) of configs people bring along that have nothing to act on here: (why, what to do instead)."""


def _walk(kind: type, prefix: str = "") -> Iterator[tuple[str, Field]]:
    for f in fields(kind):
        yield f"{prefix}{f.name}", f
        if is_dataclass(f.type):
            yield from _walk(f.type, f"{prefix}{f.name}.")


KNOBS: dict[str, Field] = {key: f for key, f in _walk(RunConfig) if not is_dataclass(f.type)}
SECTIONS: dict[str, Field] = {key: f for key, f in _walk(RunConfig) if is_dataclass(f.type)}


def canonical(spelling: str) -> str:
    """``spelling`` with an accepted alias replaced."""
    for alias, key in ALIASES.items():
        if spelling == alias or spelling.startswith(f"{alias}."):
            return key + spelling.removeprefix(alias)
    return spelling


def absent_reason(key: str) -> tuple[str, str] | None:
    """(why, what to do instead) for a key known from elsewhere that has nothing to act on here."""
    for absent, reason in ABSENT.items():
        if key == absent or key.startswith(f"{absent}."):
            return reason
    return None


def nearest(key: str) -> str | None:
    """The real key most like ``key``: a familiar name, the same name elsewhere in the tree, else similar spelling."""
    name = key.rpartition(".")[2]
    known_keys = [*SECTIONS, *KNOBS]
    elsewhere = [known for known in known_keys if known.endswith(f".{key}")]
    if name in FAMILIAR and not ("." in key and elsewhere):
        return FAMILIAR[name]
    if elsewhere:
        return elsewhere[0]

    def likeness(known: str) -> float:
        # the last name counts most, then how much of the rest is in the real key: sections are often forgotten
        rest = SequenceMatcher(None, key, known)
        inside = sum(block.size for block in rest.get_matching_blocks()) / len(key)
        return SequenceMatcher(None, name, known.rpartition(".")[2]).ratio() + 0.5 * inside

    best = max(known_keys, key=likeness)
    return best if likeness(best) > 1.0 else None


def without_none(kind: Any) -> Any:
    """``X`` of ``X | None``."""
    if get_origin(kind) in (types.UnionType, Union):
        (kind,) = (part for part in get_args(kind) if part is not types.NoneType)
    return kind


def choices(kind: Any) -> tuple[Any, ...]:
    """What a ``Literal``, or a list of them, allows; empty for other types."""
    kind = without_none(kind)
    if get_origin(kind) is list:
        (kind,) = get_args(kind)
    return get_args(kind) if get_origin(kind) is Literal else ()


def describe(kind: Any) -> str:
    """A type in words: "a whole number", "a list of numbers, or null"."""
    bare = without_none(kind)
    if bare is not kind:
        return f"{describe(bare)}, or null"
    if get_origin(kind) is list:
        (item,) = get_args(kind)
        return f"a list: each {describe(item)}"
    if get_origin(kind) is dict:
        return "a mapping"
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[kind]


def typed(key: str, value: Any) -> str:
    """``key=value`` as one types it."""
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"
