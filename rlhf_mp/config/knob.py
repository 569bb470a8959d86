"""How a knob is declared: a dataclass field with its documentation and its own range."""

from collections.abc import Collection
from dataclasses import MISSING, field
from typing import Any


def knob(
    default: Any,
    help: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    names: Collection[str] = (),
) -> Any:
    """A field with its documentation and its own range. A mutable default is copied for every config.

    Args:
        names: of a text: the registered names; ``package.module:function`` is accepted beside them.
    """
    metadata = {"help": help, "ge": ge, "gt": gt, "le": le, "names": tuple(names)}
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: type) -> Any:
    return field(default_factory=kind, metadata={"help": (kind.__doc__ or "").splitlines()[0]})


def default_of(f: Any) -> Any:
    return f.default if f.default is not MISSING else f.default_factory()
