"""Decode attention on CPU for many sequences at once.

SGLang's torch_native backend calls scaled_dot_product_attention once per sequence and layer; with small models and
hundreds of sequences those calls, not the arithmetic, are what a step consists of.

Shapes: N sequences, one new token each; H query and K key-value heads of width D; S slots of the KV cache.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

CHUNK = 32  # sequences of similar length whose keys are gathered together: they still fit into the processor's cache


def decode(
    original: Callable,
    backend: Any,
    query: Float[Tensor, "N H D"],
    output: Float[Tensor, "N H D"],
    k_cache: Float[Tensor, "S K D"],
    v_cache: Float[Tensor, "S K D"],
    req_to_token: Int[Tensor, "R L"],
    req_pool_indices: Int[Tensor, "N"],
    seq_lens: Int[Tensor, "N"],
    encoder_lens: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Around ``TorchNativeAttnBackend._run_sdpa_forward_decode``. Writes to ``output``.

    A sliding window and encoder-decoder models are left to the original.
    """
    if encoder_lens is not None or (options["sliding_window_size"] or -1) >= 0:
        return original(
            backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens, **options
        )
    for rows in seq_lens.argsort().split(CHUNK):
        lengths = seq_lens[rows]
        slots = req_to_token[req_pool_indices[rows], : int(lengths[-1])]
        output[rows] = attend(query[rows], k_cache, v_cache, slots, lengths, options["scaling"]).to(output.dtype)
    return output


def attend(
    query: Float[Tensor, "N H D"],
    k_cache: Float[Tensor, "S K D"],
    v_cache: Float[Tensor, "S K D"],
    slots: Int[Tensor, "N L"],
    lengths: Int[Tensor, "N"],
    scale: float,
) -> Float[Tensor, "N H D"]:
    """Each query attends to the first ``lengths[n]`` slots of its row; consecutive query heads share a key head."""
    unseen = torch.arange(slots.shape[1]) >= lengths[:, None]  # [N, L]
    chosen = slots.where(~unseen, slots[:, :1]).flatten()  # padding repeats a token of its own sequence: it is finite

    def gather(cache: Float[Tensor, "S K D"]) -> Float[Tensor, "N K L D"]:
        rows = cache.flatten(1).index_select(0, chosen)  # whole rows: ten times as fast as cache[slots]
        return rows.view(*slots.shape, *cache.shape[1:]).transpose(1, 2)

    keys, values = gather(k_cache), gather(v_cache)
    attended = torch.nn.functional.scaled_dot_product_attention(
        query[:, :, None].to(keys.dtype), keys, values, ~unseen[:, None, None], scale=scale, enable_gqa=True
    )
    return attended.squeeze(2)
