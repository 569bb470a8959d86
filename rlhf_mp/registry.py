"""Look things up by the name a config uses."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class ImportProblem(ValueError):
    """A function of one's own that is not where its name says."""

    def __init__(self, reason: str, fix: str):
        self.fix = fix
        super().__init__(reason)


def imported(path: str) -> Any:
    """The function at ``package.module:function``; modules are looked for in the working directory too.

    Raises:
        ImportProblem: the module cannot be imported, or has no such function.
    """
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever their module raises
        reason = f"cannot import {module_name}: {type(error).__name__}: {error}"
        raise ImportProblem(reason, "a module that python -c 'import ...' finds from the working directory") from error
    if not callable(getattr(module, name, None)):
        functions = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise ImportProblem(f"{module_name} has no function {name}", f"one of {', '.join(functions)}")
    return getattr(module, name)


class Registry(Generic[T]):
    def __init__(self, kind: str):
        self.kind = kind
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: make ``name`` mean the decorated thing."""

        def add(item: T) -> T:
            if name in self._items:
                raise KeyError(f"{self.kind} {name!r} is registered twice")
            self._items[name] = item
            return item

        return add

    def __getitem__(self, name: str) -> T:
        try:
            return self._items[name]
        except KeyError:
            raise KeyError(f"no {self.kind} named {name!r}; known: {', '.join(sorted(self._items))}") from None

    def find(self, name: str) -> T:
        """What is registered under ``name``, or the function that ``package.module:function`` names.

        Raises:
            ImportProblem: there is no such module or function.
        """
        return imported(name) if ":" in name else self[name]

    def __contains__(self, name: str) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._items))
