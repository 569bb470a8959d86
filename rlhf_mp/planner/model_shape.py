"""What decides a decoder's memory and arithmetic: its shape, as counts. Parameters are counted, never guessed."""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer. All sizes are numbers of elements."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False  # the head shares the embedding's matrix
    gated: bool = True  # SwiGLU-like: three matrices instead of two
    qkv_bias: bool = False
    out_bias: bool = False  # on the attention's output projection
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: bool = False  # a norm of width head_dim on queries and keys
    norm_vectors: int = 1  # 1: RMSNorm; 2: LayerNorm with bias
    norms_per_layer: int = 2
    positions: int = 0  # rows of a learned position table
    max_context: int | None = None

    @property
    def q_dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * self.head_dim

    @cached_property
    def attention_params(self) -> int:
        matrices = 2 * self.hidden * self.q_dim + 2 * self.hidden * self.kv_dim
        biases = (self.q_dim + 2 * self.kv_dim) * self.qkv_bias + self.hidden * self.out_bias
        return matrices + biases + 2 * self.head_dim * self.qk_norm

    @property
    def mlp_params(self) -> int:
        matrices = 2 + self.gated
        return matrices * self.hidden * self.ffn + ((matrices - 1) * self.ffn + self.hidden) * self.mlp_bias

    @property
    def norm_params(self) -> int:
        """Of all layers and the one after the last: replicated under tensor parallelism."""
        return (self.layers * self.norms_per_layer + 1) * self.hidden * self.norm_vectors

    @cached_property
    def linear_params(self) -> int:
        """Of the attention and MLP matrices of all layers: what LoRA wraps and quantization shrinks."""
        return self.layers * (self.attention_params + self.mlp_params)

    @property
    def layer_params(self) -> int:
        return self.attention_params + self.mlp_params + self.norms_per_layer * self.hidden * self.norm_vectors

    @property
    def embedding_params(self) -> int:
        return (self.vocab + self.positions) * self.hidden

    @property
    def head_params(self) -> int:
        return (0 if self.tied else self.vocab * self.hidden) + self.vocab * self.head_bias

    @cached_property
    def num_params(self) -> int:
        return self.linear_params + self.norm_params + self.embedding_params + self.head_params

    @property
    def num_params_scalar_head(self) -> int:
        """A critic or reward model: the vocabulary head is replaced by one output."""
        return self.linear_params + self.norm_params + self.embedding_params + self.hidden

    @property
    def matmul_params(self) -> int:
        """What a token is multiplied with in one forward pass; looking up its embedding costs nothing."""
        return self.linear_params + self.vocab * self.hidden

    @property
    def largest_module(self) -> int:
        """Elements of the largest tensor that must be whole while it is used."""
        return max(self.vocab * self.hidden, self.hidden * self.ffn)
