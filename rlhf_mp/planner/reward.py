"""What a reward model in the loop holds: on the ranks, or in an SGLang server of its own."""

from rlhf_mp.planner.amount import Amount, amount
from rlhf_mp.planner.inference import cache_bytes_per_token, workspace
from rlhf_mp.planner.job import Adapter, Job
from rlhf_mp.planner.states import base_weights
from rlhf_mp.planner.term import Component, Role, Term


def rank_weights(job: Job) -> Amount:
    """All of its weights, before they are spread over the ranks."""
    shape = job.reward_model
    if job.reward_quantization is None:
        return amount(job.precision.weights, "bytes").times(shape.num_params_scalar_head, "parameters")
    quantized = base_weights(shape, Adapter(quantization=job.reward_quantization), job.precision.weights)
    head = job.precision.weights * (shape.num_params - shape.num_params_scalar_head)
    return Amount(quantized.value - head, f"{quantized.formula} - {head:,.0f} of the vocabulary's head")


def server_terms(job: Job) -> list[Term]:
    """On each GPU of a server: weights, and the cache and workspace of the one batch that is scored at once."""
    server, shape = job.reward_server, job.reward_model
    if server is None:
        return []
    weights = amount(server.weight_bytes, "bytes").times(shape.num_params_scalar_head, "parameters")
    cache = cache_bytes_per_token(shape, server.tp, server.cache_bytes).times(server.max_cache_tokens, "tokens")
    return [
        Term(Role.reward_server, Component.weights, weights.over(server.tp, "tp")),
        Term(Role.reward_server, Component.kv_cache, cache),
        Term(Role.reward_server, Component.cuda_graphs, workspace(shape, server)),
    ]
