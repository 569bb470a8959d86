"""Matrices of frozen layers in 4 or 8 bits, unpacked whenever they are used. The only module that imports bitsandbytes.

Source: QLoRA, arXiv:2305.14314 section 3: 4-bit NormalFloat, with scales that are quantized themselves. 8 bits:
LLM.int8(), arXiv:2208.07339 section 2.1: whole numbers with a scale for each row of the matrix; activations stay whole.
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
    if quantization == "int8":
        settings = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=HEADS)
    else:
        settings = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=quantization,
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_quant_storage=dtype,
            llm_int8_skip_modules=HEADS,
        )
    return {"quantization_config": settings}


def as_it_trains(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """``model``, changed: its quantized layers compute with matrices that anyone can unpack.

    bitsandbytes would round the activations of 8-bit layers, too: engines would then sample from another model. And on
    some CPUs it repacks a 4-bit matrix for bfloat16, for good, when it is first used without gradient: log-probs would
    be of another model, and there would be no gradient later.
    """
    for part in list(model.modules()):
        if hasattr(part, "support_avx512bf16_for_cpu"):
            part.support_avx512bf16_for_cpu = False
        for name, child in part.named_children():
            if hasattr(getattr(child, "weight", None), "SCB"):
                setattr(part, name, EightBitLinear(child, dtype))
    return model


class EightBitLinear(nn.Linear):
    """y = x W^T + b, where W [out in] is unpacked for each use.

    ``weight`` holds the bytes of W in elements of ``dtype``; its attribute ``row_scales`` [out] what 1 is worth.
    """

    def __init__(self, loaded: nn.Linear, dtype: torch.dtype):
        nn.Module.__init__(self)
        self.in_features, self.out_features = loaded.in_features, loaded.out_features
        self.weight = nn.Parameter(loaded.weight.data.contiguous().view(dtype), requires_grad=False)
        self.weight.row_scales = loaded.weight.SCB.float() / 127
        self.bias = loaded.bias

    def forward(self, x: Tensor) -> Tensor:
        return EightBitProduct.apply(x, self.weight, self.bias)


class EightBitProduct(torch.autograd.Function):
    """Keeps the packed matrix alone for the backward pass, which unpacks it once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None) -> Tensor:
        ctx.weight = weight  # not saved: ZeRO-3 takes its elements away in between, and brings them back
        return nn.functional.linear(x, dequantized(weight).to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        return grad @ dequantized(ctx.weight).to(grad.dtype) if ctx.needs_input_grad[0] else None, None, None


def is_quantized(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "quant_state") or hasattr(parameter, "row_scales")


def dequantized(parameter: nn.Parameter) -> Tensor:
    """The matrix [out in] that the layer computes with."""
    if hasattr(parameter, "row_scales"):
        whole = parameter.data.view(torch.int8)
        return (whole * parameter.row_scales.to(whole.device)[:, None]).to(parameter.dtype)
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(parameter.data, parameter.quant_state)
