"""Episodes of several turns between the policy and an environment."""

from dataclasses import dataclass
from typing import Any

from rlhf_mp.config.knob import knob

ENVIRONMENTS = ("calculator", "guess")


@dataclass
class MultiTurnConfig:
    """Episodes: the policy's turns and an environment's answers."""

    enable: bool = knob(False, "sample episodes instead of single responses")
    environment: str = knob("calculator", "registered environment, or package.module:Class", names=ENVIRONMENTS)
    environment_args: dict[str, Any] = knob({}, "passed on to the environment by name")
    max_assistant_turns: int = knob(8, "turns of the policy; then the episode ends", ge=1)
    max_tokens_per_turn: int | None = knob(
        None, "sampled in one turn at most; unset: what is left of the episode", ge=1
    )
    max_tool_response_length: int = knob(256, "tokens of one answer of the environment; the rest is cut off", ge=1)
    tool_timeout_s: float = knob(30.0, "an environment that has not answered by then ends its episode", gt=0)
    episode_timeout_s: float = knob(600.0, "no new turn starts after that", gt=0)
