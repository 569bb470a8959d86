"""All rewards a config can name: importing this module registers them."""

from rlhf_mp.rewards import exact, math  # noqa: F401
from rlhf_mp.rewards.base import rewards

__all__ = ["rewards"]
