"""Rules of episodes."""

import re
from collections.abc import Iterator
from dataclasses import asdict

from rlhf_mp.config.multi_turn import ENVIRONMENTS, MultiTurnConfig
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.errors import Problem

KEY = "actor_rollout_ref.rollout.multi_turn"
CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def multi_turn_problems(config: RunConfig) -> Iterator[Problem]:
    """Contradictions between the limits, and limits without an episode."""
    knobs = config.actor_rollout_ref.rollout.multi_turn
    longest = config.data.max_response_length
    if not knobs.enable:
        changed = {name for name, value in asdict(knobs).items() if value != getattr(MultiTurnConfig(), name)}
        for name in sorted(changed):
            reason = f"no effect with {KEY}.enable=false"
            yield Problem(f"{KEY}.{name}", getattr(knobs, name), reason, f"{KEY}.enable=true, or remove it")
        return
    if knobs.environment not in ENVIRONMENTS and not CLASS.fullmatch(knobs.environment):
        reason = f"must be one of {', '.join(ENVIRONMENTS)}, or package.module:Class"
        yield Problem(f"{KEY}.environment", knobs.environment, reason, f"{KEY}.environment={ENVIRONMENTS[0]}")
    if knobs.max_tokens_per_turn is not None and knobs.max_tokens_per_turn > longest:
        reason = (
            f"the whole episode has data.max_response_length = {longest} tokens, answers of the environment included"
        )
        yield Problem(f"{KEY}.max_tokens_per_turn", knobs.max_tokens_per_turn, reason, f"{longest} or less")
    if knobs.max_tool_response_length >= longest:
        reason = f"one answer may fill the whole episode of data.max_response_length = {longest} tokens"
        yield Problem(f"{KEY}.max_tool_response_length", knobs.max_tool_response_length, reason, f"less than {longest}")
    if knobs.tool_timeout_s > knobs.episode_timeout_s:
        reason = f"longer than {KEY}.episode_timeout_s = {knobs.episode_timeout_s:g}"
        yield Problem(f"{KEY}.tool_timeout_s", knobs.tool_timeout_s, reason, f"{knobs.episode_timeout_s:g} or less")
