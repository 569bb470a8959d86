"""Models that give one number per position: a decoder with a linear layer in place of its vocabulary.

Their checkpoints are those of transformers' ``AutoModelForTokenClassification`` (critics) and
``AutoModelForSequenceClassification`` (reward models) with one label. The modules are made here: transformers' own
classes drop out before the head, pool over padding tokens, or don't exist for an architecture.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel
from transformers import initialization as init

from rlhf_mp.errors import ConfigError, Problem
from rlhf_mp.models.hf import without_dropout
from rlhf_mp.models.packed_attention import attention_for, check_packing
from rlhf_mp.models.quantized import as_it_trains, quantized_loading


def load_scalar_model(
    path: str,
    dtype: torch.dtype,
    *,
    bias: bool,
    packed: bool = False,
    attention: str = "auto",
    quantization: str | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Any decoder's checkpoint with a head of one output, which is 0 where the checkpoint has none.

    The module maps ``input_ids`` [B T] to [B T 1].

    Args:
        packed: it will see rows of several sequences.
        attention, quantization: see ``Loading`` in hf.py.

    Raises:
        ConfigError: transformers has no such decoder.
    """
    config = without_dropout(AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code))
    if type(config) not in MODEL_MAPPING:
        reason = f"no decoder of type {config.model_type} without its vocabulary is known"
        raise ConfigError([Problem("critic.model.path", path, reason, "a model that transformers itself contains")])
    kind = scalar_class(MODEL_MAPPING[type(config)], bias)
    attention = attention_for(attention, dtype, packed=packed)
    quantized = quantized_loading(quantization, dtype)
    model = kind.from_pretrained(path, config=config, dtype=dtype, attn_implementation=attention, **quantized)
    if packed:
        check_packing(model)
    model.config.use_cache = False
    return as_it_trains(model, dtype)


@cache
def scalar_class(backbone: type[PreTrainedModel], bias: bool) -> type[PreTrainedModel]:
    """The class of ``backbone`` with a linear layer ``score`` on top, with or without bias."""
    family = next(base for base in backbone.__mro__ if PreTrainedModel in base.__bases__)

    class ScalarModel(family):
        _keys_to_ignore_on_load_unexpected = [r"lm_head\..*", r"score\.bias"]
        _keys_to_ignore_on_load_missing = [r"score\..*"]

        def __init__(self, config: PretrainedConfig):
            super().__init__(config)
            setattr(self, self.base_model_prefix, backbone(config))
            self.score = nn.Linear(config.hidden_size, 1, bias=bias)
            self.post_init()

        def _init_weights(self, module: nn.Module) -> None:
            super()._init_weights(module)
            if module is self.score:
                init.zeros_(module.weight)

        def forward(self, input_ids: Tensor, **inputs: Any) -> Tensor:
            decoder = getattr(self, self.base_model_prefix)
            return self.score(decoder(input_ids=input_ids, use_cache=False, **inputs).last_hidden_state)

    return ScalarModel


def classifier_config(config: dict[str, Any], task: str) -> dict[str, Any]:
    """config.json of such a checkpoint, from that of the decoder it was made from."""
    name = config["architectures"][0].partition("For")[0]
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return config | labels | {"architectures": [f"{name}For{task}"], "classifier_dropout": 0.0}
