"""From a causal language model to the log-probs of the tokens that were sampled.

Shapes: B sequences, T tokens, V vocabulary.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rlhf_mp.data.types import PolicyOutput, TokenBatch
from rlhf_mp.models.chunked_head import Scoring, head_outputs, standing_in
from rlhf_mp.models.packing import packed_row


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


def policy_output(
    model: nn.Module,
    batch: TokenBatch,
    *,
    temperature: float,
    entropy_grad: bool,
    logits_chunk_bytes: int = 0,
    packed: bool = False,
) -> PolicyOutput:
    """One forward pass. Both results are [B, T], and right wherever the mask is 1.

    The head runs only for columns that some row's mask selects, for a packed row only where the mask is 1: with long
    prompts that is most of its work saved.

    Args:
        logits_chunk_bytes: float32 logits that may exist at once; 0: all of the micro-batch's.
        packed: the sequences go through the model as one row, without the padding between them.

    Raises:
        ValueError: the model changes its logits after the head.
    """
    scoring = Scoring(temperature, entropy_grad, logits_chunk_bytes)
    return _packed(model, batch, scoring) if packed else _padded(model, batch, scoring)


def _packed(model: nn.Module, batch: TokenBatch, scoring: Scoring) -> PolicyOutput:
    row = packed_row(batch)
    chosen = batch.mask.flatten()[row.destination].nonzero()[:, 0]
    if not len(chosen):
        chosen = torch.zeros(1, dtype=torch.long, device=batch.tokens.device)  # a micro-batch that counts for nothing
    columns = row.source[chosen]
    inputs = {"input_ids": row.tokens, "logits_to_keep": columns, "use_cache": False} | row.attention_inputs()
    values = run_model(model, inputs, row.tokens[:, columns + 1], scoring)
    return PolicyOutput(*(row.home(x[0], chosen) for x in values))


def _padded(model: nn.Module, batch: TokenBatch, scoring: Scoring) -> PolicyOutput:
    width = batch.tokens.shape[1]
    scored = batch.mask.any(0).nonzero()
    first = max(1, int(scored[0])) if len(scored) else width - 1
    columns = torch.arange(first - 1, width - 1, device=batch.tokens.device)
    inputs = {"input_ids": batch.tokens, "logits_to_keep": columns, "use_cache": False}
    logprobs, entropy = run_model(model, inputs, batch.tokens[:, first:], scoring)
    pad = (first, 0)
    return PolicyOutput(nn.functional.pad(logprobs, pad), nn.functional.pad(entropy, pad))


def run_model(
    model: nn.Module, inputs: dict, targets: Int[Tensor, "B S"], scoring: Scoring
) -> tuple[Float[Tensor, "B S"], Float[Tensor, "B S"]]:
    """Log-probs of ``targets`` and entropies, from the positions that ``inputs`` asks logits of."""
    if not scoring.chunk_bytes:
        logits = model(**inputs).logits.float()
        if scoring.temperature != 1.0:
            logits = logits / scoring.temperature
        return token_logprobs_and_entropy(logits, targets, entropy_grad=scoring.entropy_grad)
    head = model.get_output_embeddings()
    made = []

    def score(hidden: Float[Tensor, "B S H"]) -> Float[Tensor, "B S 2"]:
        pair = head_outputs(hidden.flatten(0, 1), head.weight, head.bias, targets.flatten(), scoring)
        made.append(torch.stack(pair, dim=-1).view(*targets.shape, 2))
        return made[0]

    with standing_in(head, score):
        values = model(**inputs).logits
    if values.untyped_storage() is not made[0].untyped_storage():
        raise ValueError(
            f"{type(model).__name__} scales or caps its logits after the head, so they cannot be computed in chunks: "
            "actor_rollout_ref.model.logits_chunk_mb=0"
        )
    return values.unbind(-1)
