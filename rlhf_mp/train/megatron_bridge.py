"""Hugging Face checkpoints in and out of Megatron models, through mbridge. The only module that imports mbridge.

Names and layouts of weights are mbridge's; what is ours is the torch layers, tied embeddings, rotary embeddings as
transformers 5 describes them, and refusing what it would convert wrongly.
"""

import io
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib.util import find_spec
from math import lcm
from typing import Any

import torch
from mbridge.core.safetensor_io import SafeTensorIO
from mbridge.core.util import unwrap_model
from mbridge.models.llama import LLaMABridge
from mbridge.models.qwen2 import Qwen2Bridge
from mbridge.models.qwen3 import Qwen3Bridge
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig

from rlhf_mp.config.schema import MegatronConfig
from rlhf_mp.errors import ConfigError, Problem
from rlhf_mp.models.heads import Head
from rlhf_mp.train.megatron_heads import last_layers
from rlhf_mp.train.megatron_layers import torch_layers

MODEL_KEY = "actor_rollout_ref.model.path"
NO_INITIALISATION = {name: lambda weight: weight for name in ("init_method", "output_layer_init_method")}
"""Every weight is read from the checkpoint. (``perform_initialization=False`` would leave out more than the numbers:
it no longer marks which weights are tensor-parallel.)"""
VOCABULARY_MULTIPLE = 128  # rows of the embedding are padded to it: the same at any tensor-parallel size up to 128


class HfBridge:
    """One Hugging Face checkpoint, and Megatron models of its shape."""

    def __init__(
        self, path: str, head: Head, megatron: MegatronConfig, dtype: torch.dtype, *, trust_remote_code: bool = False
    ):
        """
        Raises:
            ConfigError: the architecture is not one that can be converted exactly.
        """
        hf_config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        if hf_config.model_type not in BRIDGES:
            known = ", ".join(sorted(BRIDGES))
            raise ConfigError(
                [Problem(MODEL_KEY, path, f"Megatron trains {known}, not {hf_config.model_type}", OTHER_BACKEND)]
            )
        self.path, self.vocab_size, self.last_layers = path, hf_config.vocab_size, last_layers(head)
        if self.last_layers:
            hf_config.tie_word_embeddings = False  # there is no vocabulary to share the embeddings with
        multiple = lcm(VOCABULARY_MULTIPLE, megatron.tensor_model_parallel_size)
        self._bridge = BRIDGES[hf_config.model_type](hf_config, dtype=dtype, make_vocab_size_divisible_by=multiple)
        self._bridge.is_scalar = bool(self.last_layers)
        self._bridge.use_transformer_engine = uses_transformer_engine(megatron)
        self._dtype = dtype

    @property
    def config(self) -> TransformerConfig:
        """Of the models built last; schedules look up their hooks here."""
        return self._bridge.config

    def build(self, settings: dict[str, Any], ddp: dict[str, Any] | None) -> list[nn.Module]:
        """This rank's part of the model with the checkpoint's weights: one module for each of its pipeline stages.

        Args:
            settings: fields of Megatron's TransformerConfig.
            ddp: fields of its DistributedDataParallelConfig; None: a model that is not trained.
        """
        self._bridge.set_extra_args(**settings, **NO_INITIALISATION)  # before a model copies the config
        with redirect_stdout(io.StringIO()):  # it prints parameter counts
            models = self._bridge.get_model(
                bf16=self._dtype == torch.bfloat16,
                wrap_with_ddp=ddp is not None,
                data_parallel_random_init=False,
                ddp_config=ddp,
                post_model_creation_callbacks=self.last_layers,
            )
            self._bridge.load_weights(models, self.path)
        if ddp is not None and self._bridge.hf_config.pad_token_id is not None:
            _freeze_padding_embedding(models, self._bridge.hf_config.pad_token_id)
        return models

    def export(self, models: list[nn.Module]) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under Hugging Face names, each once, on every rank. Collective: all ranks must exhaust it."""
        seen = set()
        with torch.no_grad():
            for name, tensor in self._bridge.export_weights(models):
                if name not in seen:  # with tied embeddings the last pipeline stage holds a copy of the first's
                    seen.add(name)
                    yield name, tensor


def _freeze_padding_embedding(models: list[nn.Module], pad_token_id: int) -> None:
    """No gradient through the embedding of the padding token, should a policy sample it: so Hugging Face's models do.

    Often its embedding is 0, which the first norm would amplify to a gradient larger than all others together.
    """

    def detach_padding(embedding: nn.Module, args: tuple, kwargs: dict[str, Tensor], output: Tensor) -> Tensor:
        is_padding = (kwargs["input_ids"] == pad_token_id).T  # [S, B], like ``output`` [S, B, H]
        if embedding.config.sequence_parallel:
            group = parallel_state.get_tensor_model_parallel_group()
            is_padding = is_padding.chunk(group.size())[group.rank()]
        return torch.where(is_padding[..., None], output.detach(), output).contiguous()

    for model in unwrap_model(models):
        if model.pre_process:
            model.embedding.register_forward_hook(detach_padding, with_kwargs=True)


def uses_transformer_engine(megatron: MegatronConfig) -> bool:
    if megatron.transformer_impl == "auto":
        return torch.cuda.is_available() and find_spec("transformer_engine") is not None
    return megatron.transformer_impl == "te"


def rotary_arguments(config: PretrainedConfig) -> dict[str, Any]:
    """What Megatron's model needs to rotate as this checkpoint's model does.

    Raises:
        ConfigError: it scales its rotary embedding in a way that Megatron does not have.
    """
    rope = config.rope_parameters
    arguments: dict[str, Any] = {"rotary_base": rope["rope_theta"]}
    if rope["rope_type"] == "default":
        return arguments
    if rope["rope_type"] == "linear":
        return arguments | {"seq_len_interpolation_factor": rope["factor"]}
    # Megatron's "rope_scaling" is that of Llama 3, with these constants fixed.
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if rope["rope_type"] == "llama3" and all(rope[name] == value for name, value in fixed.items()):
        return arguments | {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    reason = f"Megatron has no rotary embedding like its {dict(rope)}"
    raise ConfigError([Problem(MODEL_KEY, config.name_or_path, reason, OTHER_BACKEND)])


OTHER_BACKEND = "actor_rollout_ref.actor.strategy=deepspeed, or another model"
HEAD = {"output_layer.weight": "score.weight", "output_layer.bias": "score.bias"}
"""A last layer with one output, and its name in Hugging Face's classifiers."""
RENAMED = (
    (".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"),
    (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"),
)
"""Where the torch layers' norms are called otherwise than Transformer Engine's, which mbridge knows."""


class _NewHeadIsZero(SafeTensorIO):
    """Reads a checkpoint's weights; those of a head of one output that it has not got are 0."""

    def __init__(self, directory: str, hidden_size: int):
        super().__init__(directory)
        self.new = {"score.weight": (1, hidden_size), "score.bias": (1,)}

    def load_some_hf_weight(self, hf_weight_names: list[str]) -> dict[str, Tensor]:
        wanted = set(hf_weight_names) & self.new.keys()
        absent = wanted - set(self.load_hf_weight_names() if wanted else ())
        found = super().load_some_hf_weight([name for name in hf_weight_names if name not in absent])
        return found | {name: torch.zeros(self.new[name]) for name in absent}


class _OurLayers:
    """Put before an mbridge class: what is different here."""

    has_vp_stage = True
    use_transformer_engine = False
    is_scalar = False  # the last layer has one output, and the name it has in classifiers

    def _adjust_mapping_for_shared_weights(self) -> None:
        self._DIRECT_MAPPING = dict(self._DIRECT_MAPPING)  # mbridge would edit its class, and so the next model's
        if self.hf_config.tie_word_embeddings:
            self._DIRECT_MAPPING["output_layer.weight"] = "model.embed_tokens.weight"

    def _get_gptmodel_args(self) -> dict[str, Any]:
        config = self.hf_config
        sizes = {"vocab_size": config.vocab_size, "max_sequence_length": config.max_position_embeddings}
        return sizes | {"position_embedding_type": "rope"} | rotary_arguments(config)

    def _get_transformer_layer_spec(self, vp_stage: int | None = None):
        if self.use_transformer_engine:
            return super()._get_transformer_layer_spec(vp_stage)
        return torch_layers(self.config, vp_stage)

    def _weight_name_mapping_mcore_to_hf(self, name: str) -> list[str]:
        if self.is_scalar and name in HEAD:
            return [HEAD[name]]
        for ours, theirs in RENAMED:
            name = name.replace(ours, theirs)
        return super()._weight_name_mapping_mcore_to_hf(name)

    def _weight_to_mcore_format(self, name: str, weights: list[Tensor]) -> Tensor:
        if self.is_scalar and name in HEAD:  # mbridge would pad it as a vocabulary
            return weights[0].to(self.dtype)
        return super()._weight_to_mcore_format(name, weights)

    def _weight_to_hf_format(self, name: str, weight: Tensor) -> tuple[list[str], list[Tensor]]:
        if self.is_scalar and name in HEAD:
            return [HEAD[name]], [weight]
        return super()._weight_to_hf_format(name, weight)

    def _get_safetensor_io(self, weights_path: str) -> SafeTensorIO:
        return _NewHeadIsZero(self._get_actual_hf_path(weights_path), self.hf_config.hidden_size)


class _Llama(_OurLayers, LLaMABridge): ...


class _Qwen2(_OurLayers, Qwen2Bridge): ...


class _Qwen3(_OurLayers, Qwen3Bridge): ...


BRIDGES = {"llama": _Llama, "qwen2": _Qwen2, "qwen3": _Qwen3}
