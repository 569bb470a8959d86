"""A Megatron layer without Transformer Engine: torch's RMSNorm and attention, everything else Megatron's own.

Megatron's own torch layers know neither RMSNorm under sequence parallelism, nor packed sequences, nor context
parallelism; these do. They run on CPU and GPU alike.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
    """Computed in float32, as Hugging Face's models do; marked for the reduction of sequence-parallel gradients."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * F.rms_norm(x.float(), self.normalized_shape, None, self.eps).to(x.dtype)


class _GatherSequence(torch.autograd.Function):
    """All-gather along dimension 0; the backward pass reduces and scatters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        own = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None


def zigzag_positions(rank: int, num_ranks: int, length: int, device: torch.device) -> Tensor:
    """The positions of a sequence that a context-parallel rank holds: chunks r and 2n - 1 - r of 2n.

    Under a causal mask an early chunk is cheap and a late one dear, so each rank has one of both.
    """
    chunk = length // (2 * num_ranks)
    starts = (rank * chunk, (2 * num_ranks - 1 - rank) * chunk)
    return torch.cat([torch.arange(start, start + chunk, device=device) for start in starts])


class TorchAttention(MegatronModule):
    """Causal attention on torch's scaled_dot_product_attention."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        *,
        pg_collection: ProcessGroupCollection,
        softmax_scale: float | None = None,
        **_: Any,
    ):
        super().__init__(config=config)
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.context_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """
        Args:
            query: [S, B, heads, head_dim], or [tokens, heads, head_dim] with ``packed_seq_params``; so key and value.
            attention_mask: unused, the mask is causal.
        """
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params.cu_seqlens_q.tolist())
        visible = None
        if self.context_group.size() > 1:
            visible = self._visible(query.shape[0], query.device)
            key, value = (_GatherSequence.apply(x, self.context_group) for x in (key, value))
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return self._attend(q, k, v, visible).permute(2, 0, 1, 3).flatten(2)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, starts: list[int]) -> Tensor:
        parts = []
        for start, end in zip(starts[:-1], starts[1:], strict=True):
            q, k, v = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))
            parts.append(self._attend(q, k, v, None)[0].transpose(0, 1))
        return torch.cat(parts).flatten(1)

    def _visible(self, own_length: int, device: torch.device) -> Tensor:
        """Which of the gathered keys each of this rank's queries may see."""
        ranks, length = self.context_group.size(), own_length * self.context_group.size()
        positions = [zigzag_positions(rank, ranks, length, device) for rank in range(ranks)]
        return torch.cat(positions)[None, :] <= positions[self.context_group.rank()][:, None]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=visible is None, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )


class TorchSpecProvider(LocalSpecProvider):
    """Tells Megatron which classes to build layers from."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return RMSNorm

    def core_attention(self) -> type:
        return TorchAttention


def torch_layers(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The decoder block of one pipeline stage."""
    layer = _layer_spec(config)
    return TransformerBlockSubmodules([layer] * get_num_layers_to_build(config, vp_stage=vp_stage), layer_norm=RMSNorm)


def _layer_spec(config: TransformerConfig) -> ModuleSpec:
    provider = TorchSpecProvider()
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=provider.column_parallel_linear(),
            core_attention=provider.core_attention(),
            linear_proj=provider.row_parallel_linear(),
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    submodules = TransformerLayerSubmodules(
        input_layernorm=RMSNorm,
        self_attention=attention,
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=RMSNorm,
        mlp=get_mlp_module_spec_for_backend(provider),
        mlp_bda=get_bias_dropout_add,
        # In checkpoints the names of Transformer Engine's layers, so that either kind reads the other's.
        sharded_state_dict_keys_map={
            "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
            "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
        },
    )
    return ModuleSpec(module=TransformerLayer, submodules=submodules)
