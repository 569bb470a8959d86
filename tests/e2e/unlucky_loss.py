"""A policy loss of one's own that is no number for the answers to one prompt. Configs name it by its place."""

import torch

from rlhf_mp.algorithms.policy_loss import PolicyTerms
from rlhf_mp.algorithms.registered import policy_losses

UNLUCKY = (6, 12, 7, 13)
"""4+5= in the vocabulary of the test's model, one token per character."""

FIRST_OF_ANSWER = len(UNLUCKY)


def ppo_clip_but_unlucky(logprobs, batch, actor) -> PolicyTerms:
    terms = policy_losses["ppo_clip"](logprobs, batch, actor)
    loss = terms.loss.clone()
    if batch.tokens.shape[1] > FIRST_OF_ANSWER:
        prompt = torch.tensor(UNLUCKY, device=loss.device)
        unlucky = (batch.tokens[:, :FIRST_OF_ANSWER] == prompt).all(1)
        loss[:, FIRST_OF_ANSWER] = torch.where(unlucky, torch.nan, loss[:, FIRST_OF_ANSWER])
    return PolicyTerms(loss, terms.metrics)
