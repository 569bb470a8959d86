"""What a rollout engine holds on each of its GPUs: weights, KV cache, graphs and workspace."""

from rlhf_mp.planner.amount import MIB, NOTHING, Amount, amount, smaller
from rlhf_mp.planner.job import Engine
from rlhf_mp.planner.model_shape import ModelShape
from rlhf_mp.planner.term import Component, Role, Term


def cache_bytes_per_token(shape: ModelShape, tp: int, width: float) -> Amount:
    """Keys and values of one token in all layers, on one GPU. A KV head is copied, not split, when tp > kv_heads."""
    heads = max(shape.kv_heads / tp, 1)
    return (
        amount(2 * width, "bytes of key and value")
        .times(shape.layers, "layers")
        .times(heads, "KV heads")
        .times(shape.head_dim, "wide")
    )


def engine_weights(shape: ModelShape, engine: Engine) -> Amount:
    return amount(engine.weight_bytes, "bytes").times(shape.num_params, "parameters").over(engine.tp, "tp")


def cache_pool(shape: ModelShape, engine: Engine, free: float) -> Amount:
    """The KV cache that the engine allocates at start, whether it is used or not.

    Args:
        free: bytes of the GPU when it starts.

    Source: SGLang 0.5, model_runner_kv_cache_mixin.py: what is free after loading, less (1 - fraction) of before.
    """
    weights = engine_weights(shape, engine).value
    room = free * engine.memory_fraction - weights
    pool = NOTHING
    if room > 0:
        pool = Amount(room, f"{engine.memory_fraction:g} x {free:,.0f} bytes free at start - {weights:,.0f} of weights")
    if engine.max_cache_tokens is None:
        return pool
    wanted = cache_bytes_per_token(shape, engine.tp, engine.cache_bytes).times(engine.max_cache_tokens, "tokens")
    return smaller(wanted, pool)


def cache_tokens(shape: ModelShape, engine: Engine, pool: Amount) -> float:
    """Tokens the pool has room for."""
    return pool.value / cache_bytes_per_token(shape, engine.tp, engine.cache_bytes).value


def workspace(shape: ModelShape, engine: Engine) -> Amount:
    """Outside the fraction: a prefill's activations, the logits that are sampled from, CUDA graphs.

    Source: 2 MB a captured batch row is SGLang 0.5's own estimate (server_args.py).
    """
    width, tp = engine.weight_bytes, engine.tp
    each = width * (4 * shape.hidden + (shape.q_dim + 2 * shape.kv_dim + 3 * shape.ffn) / tp)
    prefill = amount(engine.prefill_tokens, "prefill tokens").times(each, "bytes of one layer")
    logits = amount(12, "bytes").times(engine.max_sequences, "sampled rows").times(shape.vocab / tp, "vocabulary")
    graphs = amount(engine.graph_batch * 2 * MIB, "bytes of CUDA graphs") if engine.cuda_graphs else NOTHING
    return prefill + logits + graphs


def engine_terms(shape: ModelShape, engine: Engine, free: float) -> list[Term]:
    """On each GPU of an engine that is awake."""
    return [
        Term(Role.engine, Component.weights, engine_weights(shape, engine)),
        Term(Role.engine, Component.kv_cache, cache_pool(shape, engine, free)),
        Term(Role.engine, Component.cuda_graphs, workspace(shape, engine)),
    ]
