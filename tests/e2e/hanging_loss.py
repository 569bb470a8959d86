"""A policy loss of one's own that does not return on rank 1 once training has begun. Configs name it by its place."""

import os
import time

from rlhf_mp.algorithms.policy_loss import PolicyTerms
from rlhf_mp.algorithms.registered import policy_losses


def ppo_clip_but_hanging(logprobs, batch, actor) -> PolicyTerms:
    if logprobs.grad_fn is not None and os.environ["RANK"] == "1":  # a model's, not those it is tried with at the start
        never_returns()
    return policy_losses["ppo_clip"](logprobs, batch, actor)


def never_returns() -> None:
    while True:
        time.sleep(1)
