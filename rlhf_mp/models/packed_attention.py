"""Attention within each sequence of a packed row, for transformers' models.

Registered with transformers under ``PACKED_SDPA``. Where flash attention is installed its own kernel for sequences of
different lengths is used instead; without it each sequence is one call of torch's attention, so no mask of
tokens x tokens is ever made.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

PACKED_SDPA = "packed_sdpa"
KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sequence_lengths: tuple[int, ...] | None = None,
    sliding_window: int | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Causal attention of a row of sequences; of whole rows where no ``sequence_lengths`` are given.

    Args:
        query: [B heads P head_dim]; so key and value, with fewer heads.
        sliding_window: how many tokens each may see, itself included.

    Returns:
        [B P heads head_dim], and no attention weights.
    """
    lengths = (query.shape[2],) if sequence_lengths is None else sequence_lengths
    parts = []
    for q, k, v in zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True):
        parts.append(sdpa_attention_forward(module, q, k, v, _window(q, sliding_window), **settings)[0])
    return torch.cat(parts, dim=1), None


def _window(query: Tensor, sliding_window: int | None) -> Tensor | None:
    """Which keys each query may see, where that is less than all before it."""
    length = query.shape[2]
    if sliding_window is None or length <= sliding_window:
        return None
    distance = torch.arange(length, device=query.device)[:, None] - torch.arange(length, device=query.device)
    return (distance >= 0) & (distance < sliding_window)


AttentionInterface.register(PACKED_SDPA, packed_sdpa)


def attention_for(chosen: str, dtype: torch.dtype, *, packed: bool) -> str:
    """What transformers calls the implementation for weights of ``dtype`` on this machine.

    Args:
        chosen: ``model.attn_implementation``; "auto" is flash attention for packed rows where it is there, else sdpa.
        packed: the model will see rows of several sequences.

    Raises:
        ValueError: the implementation cannot keep packed sequences apart.
    """
    if not packed:
        return "sdpa" if chosen == "auto" else chosen
    if chosen == "eager":
        raise ValueError("eager attention cannot keep the sequences of a packed row apart: use_remove_padding=false")
    has_flash = torch.cuda.is_available() and find_spec("flash_attn") is not None
    if chosen == "flash_attention_2" or (chosen == "auto" and has_flash and dtype == torch.bfloat16):
        return "flash_attention_2"
    return PACKED_SDPA


def check_packing(model: nn.Module) -> None:
    """
    Raises:
        ValueError: something in the model would let one sequence of a row see another.
    """
    layers = set(vars(model.config).get("layer_types") or KNOWN_LAYERS)
    if not model._supports_attention_backend or layers - KNOWN_LAYERS:
        raise ValueError(
            f"{type(model).__name__} cannot keep the sequences of a packed row apart "
            f"({', '.join(sorted(layers - KNOWN_LAYERS)) or 'it has attention of its own'}): "
            "actor_rollout_ref.model.use_remove_padding=false"
        )
