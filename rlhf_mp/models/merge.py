"""The tensors of a module's checkpoint, from its parameters: with LoRA, base and adapter merged one matrix at a time.

Shapes: W [out in], A [rank in], B [out rank].
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlhf_mp.config.lora_checks import PEFT_PREFIX
from rlhf_mp.models.quantized import dequantized, is_quantized

ADAPTER = "default"  # peft's name for the only adapter of a model


@dataclass(frozen=True)
class Stored:
    """A tensor under the name that readers of a file know it by."""

    name: str
    parts: tuple[nn.Parameter, ...]  # what it is computed from: all must be whole
    scale: float = 0.0  # of what an adapter adds

    def value(self) -> Tensor:
        """The parameter itself, or a new W + scale * B A in float32: whoever wants less rounds once.

        Of a quantized matrix, W is what its layer computes with.
        """
        base, *adapter = self.parts
        matrix = dequantized(base) if is_quantized(base) else base
        if not adapter:
            return matrix
        down, up = (part.detach().float() for part in adapter)
        return matrix.detach().to(torch.float32, copy=matrix is base).addmm_(up, down, alpha=self.scale)


def checkpoint_tensors(module: nn.Module) -> Iterator[Stored]:
    """All of a model under Hugging Face names, tied ones once, adapters as part of what they adapt."""
    modules = dict(module.named_modules())
    for name, parameter in module.named_parameters():
        owner, _, kind = name.rpartition(".")
        adapted = owner.removesuffix(".base_layer")
        if adapted != owner and kind == "weight":
            layer = modules[adapted]
            parts = (parameter, layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight)
            yield Stored(f"{adapted}.weight", parts, layer.scaling[ADAPTER])
        elif adapted != owner:
            yield Stored(f"{adapted}.{kind}", (parameter,))
        elif not owner.endswith((f".lora_A.{ADAPTER}", f".lora_B.{ADAPTER}")):
            yield Stored(name, (parameter,))


def adapter_tensors(module: nn.Module) -> Iterator[Stored]:
    """What is trained beside a frozen base, under peft's names."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield Stored(PEFT_PREFIX + name.replace(f".{ADAPTER}.", "."), (parameter,))
