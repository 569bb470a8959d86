"""What judges responses."""

from collections.abc import Callable, Sequence
from typing import Protocol

from rlhf_mp.config.schema import RewardConfig
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.registry import Registry


class Reward(Protocol):
    """Judges a whole group at once; never blocks the event loop."""

    num_timeouts: int  # responses that counted 0 because judging them took too long, since the start

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[float]: ...

    def close(self) -> None:
        """End whatever it started. It is not used afterwards."""
        ...


rewards: Registry[Callable[[RewardConfig], Reward]] = Registry("reward")
