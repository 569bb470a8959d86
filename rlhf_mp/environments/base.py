"""What a policy can play or work with over several turns."""

import importlib
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rlhf_mp.data.prompts import Prompt
from rlhf_mp.registry import Registry


@dataclass(frozen=True, slots=True)
class Turn:
    """An environment's answer to one turn of the policy."""

    observation: str = ""  # what the policy reads next
    reward: float = 0.0  # for this turn; an episode is paid the sum
    done: bool = False  # the episode ends here, and the observation is not read


class Environment(Protocol):
    """One episode; a new one is made for every response.

    ``async def`` methods run on the event loop that samples and must not block it; plain ``def`` methods get a thread
    of their own, which may. Either may take ``rollout.multi_turn.tool_timeout_s``; then the episode ends.
    """

    def reset(self, prompt: Prompt) -> str | Awaitable[str]:
        """Begin. Returns what the policy reads after its prompt and before its first turn."""
        ...

    def step(self, response: str) -> Turn | Awaitable[Turn]:
        """Answer what the policy said in its turn."""
        ...


environments: Registry[Callable[..., Environment]] = Registry("environment")
"""Made from ``rollout.multi_turn.environment_args``."""


def environment_maker(name: str, args: dict[str, Any]) -> Callable[[], Environment]:
    """Makes episodes of a registered environment, or of ``package.module:Class``.

    Raises:
        ImportError, AttributeError: there is no such class.
        TypeError: it does not take these arguments.
    """
    module, colon, attribute = name.partition(":")
    kind = getattr(importlib.import_module(module), attribute) if colon else environments[name]
    inspect.signature(kind).bind(**args)
    return lambda: kind(**args)
