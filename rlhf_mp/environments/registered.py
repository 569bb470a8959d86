"""All environments a config can name: importing this module registers them."""

from rlhf_mp.environments import calculator, guess  # noqa: F401
from rlhf_mp.environments.base import environment_maker, environments

__all__ = ["environment_maker", "environments"]
