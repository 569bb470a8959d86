"""What judges responses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlhf_mp.config.reward import Term
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.registry import Registry


@dataclass(frozen=True, slots=True)
class Failure:
    """A response that could not be judged."""

    kind: str  # one word, counted by itself: timeout, error, crash, invalid, count, garbage, unavailable
    reason: str


@dataclass(frozen=True, slots=True)
class Response:
    """What there is to judge."""

    text: str  # of an episode: its last turn
    num_tokens: int = 0  # that the policy chose
    paid: float = 0.0  # by the environment, over all turns
    failure: Failure | None = None  # of the environment


class Reward(Protocol):
    """Judges a whole group at once; never blocks the event loop. It keeps its own deadlines: it knows its queue."""

    async def start(self) -> str:
        """Called once before the first group. Returns what a user should know: where it runs, what protects it.

        Raises:
            RewardError: it cannot work; the run ends.
        """
        ...

    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> Sequence[float | Failure]:
        """One score per response. An exception counts as a failure of all of them, a RewardError ends the run."""
        ...

    async def close(self) -> None:
        """End whatever it started. It is not used afterwards."""
        ...


rewards: Registry[Callable[[Any, "Setting"], Reward]] = Registry("reward")
"""Made from a term's knobs and the run's."""


@dataclass(frozen=True)
class Setting:
    """What a term may need to know of the run."""

    max_response_length: int = 512  # tokens
    startup_timeout_s: float = 60.0


class TextRule:
    """A reward that is a quick function of one text; subclasses say which."""

    def __init__(self, term: Term, setting: Setting):
        self.term, self.setting = term, setting

    async def start(self) -> str:
        return ""

    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> Sequence[float | Failure]:
        return [self.worth(prompt, response) for response in responses]

    def worth(self, prompt: Prompt, response: Response) -> float | Failure:
        raise NotImplementedError

    async def close(self) -> None:
        pass  # nothing was started
