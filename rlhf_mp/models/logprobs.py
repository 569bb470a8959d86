"""From a causal language model to the log-probs of the tokens that were sampled.

Shapes: B sequences, T tokens, V vocabulary.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rlhf_mp.data.types import PolicyOutput, TokenBatch


def token_logprobs_and_entropy(
    logits: Float[Tensor, "*S V"], tokens: Int[Tensor, "*S"], *, entropy_grad: bool
) -> tuple[Float[Tensor, "*S"], Float[Tensor, "*S"]]:
    """log p(token) and the entropy (nats) of the distribution ``logits[s]`` that ``tokens[s]`` was drawn from."""
    log_z = logits.logsumexp(-1)
    logprobs = logits.gather(-1, tokens[..., None]).squeeze(-1) - log_z
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        probabilities = (logits - log_z[..., None]).exp()
        entropy = log_z - (probabilities * logits).sum(-1)
    return logprobs, entropy


def policy_output(model: nn.Module, batch: TokenBatch, *, temperature: float, entropy_grad: bool) -> PolicyOutput:
    """One forward pass. Both results are [B, T] and 0 left of the first column that any row's mask selects.

    Logits are computed for those columns only: with long prompts that is most of the head's memory saved.
    """
    width = batch.tokens.shape[1]
    scored = batch.mask.any(0).nonzero()
    first = max(1, int(scored[0])) if len(scored) else width - 1
    columns = torch.arange(first - 1, width - 1, device=batch.tokens.device)
    logits = model(input_ids=batch.tokens, logits_to_keep=columns, use_cache=False).logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    logprobs, entropy = token_logprobs_and_entropy(logits, batch.tokens[:, first:], entropy_grad=entropy_grad)
    pad = (first, 0)
    return PolicyOutput(nn.functional.pad(logprobs, pad), nn.functional.pad(entropy, pad))
