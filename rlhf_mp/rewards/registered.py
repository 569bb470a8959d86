"""All rewards a config can name: importing this module registers them."""

from rlhf_mp.rewards import code, judge, math, regex, remote, rules  # noqa: F401
from rlhf_mp.rewards.base import rewards
from rlhf_mp.rewards.weighted import make_reward

__all__ = ["make_reward", "rewards"]
