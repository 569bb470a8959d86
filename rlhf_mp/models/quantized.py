"""Matrices of frozen layers in 4 bits, unpacked whenever they are used. The only module that imports bitsandbytes.

Source: QLoRA, arXiv:2305.14314 section 3: 4-bit NormalFloat, with scales that are quantized themselves.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig

HEADS = ["lm_head", "score"]  # stay as they are


def quantized_loading(quantization: str | None, dtype: torch.dtype) -> dict[str, Any]:
    """What transformers' ``from_pretrained`` is told; nothing for a model that is not quantized.

    Args:
        dtype: of what is not quantized and of the arithmetic; the bits are kept in elements of this type, which
            ZeRO-3 can share among ranks like any other weights.
    """
    if quantization is None:
        return {}
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
        llm_int8_skip_modules=HEADS,
    )
    return {"quantization_config": settings}


def as_it_trains(model: nn.Module) -> nn.Module:
    """``model``, changed: scored by the same arithmetic as it is trained.

    On some CPUs bitsandbytes repacks a matrix for bfloat16, for good, when it is first used without gradient: log-probs
    would be of another model, and there would be no gradient later.
    """
    for part in model.modules():
        if hasattr(part, "support_avx512bf16_for_cpu"):
            part.support_avx512bf16_for_cpu = False
    return model


def is_quantized(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "quant_state")


def dequantized(parameter: nn.Parameter) -> Tensor:
    """The matrix [out in] that the layer computes with."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(parameter.data, parameter.quant_state)
