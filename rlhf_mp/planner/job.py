"""What is planned: models, layouts, batches and the engine, as plain data. Everything else follows from these."""

from dataclasses import dataclass, replace
from typing import Literal

from rlhf_mp.planner.hardware import NETWORK_RATE, Gpu
from rlhf_mp.planner.model_shape import ModelShape

Algorithm = Literal["sft", "dpo", "reward_model", "grpo", "ppo"]
Recompute = Literal["none", "selective", "mlp", "elementwise", "full"]
"""Of a layer: Megatron's selective is the attention matrix; elementwise all but matrix products and attention."""


@dataclass(frozen=True)
class Precision:
    """Bytes per parameter of each thing that training keeps, and per element of an activation."""

    name: str
    weights: float  # what the matrix products read
    gradients: float
    master: float  # a float32 copy that the optimizer changes
    moments: float  # all that the optimizer remembers: both of Adam's, SGD's momentum, or nothing
    activations: int

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.master + self.moments


BF16 = Precision("bfloat16", 2, 2, 4, 8, 2)  # ZeRO paper's K = 12, arXiv:1910.02054 section 3.1
BF16_FP32_GRADS = Precision("bfloat16, float32 gradients", 2, 4, 4, 8, 2)  # Megatron-Core's main gradients
FP32 = Precision("float32", 4, 4, 0, 8, 4)
AUTOCAST = Precision("float32 weights, bfloat16 arithmetic", 4, 4, 0, 8, 2)
OPTIMIZER_MOMENTS = {"adamw": 8.0, "adamw-8bit": 2.0, "sgd-momentum": 4.0, "sgd": 0.0}
"""Bytes a parameter. 8 bit: bitsandbytes, arXiv:2110.02861."""


def with_optimizer(precision: Precision, name: str) -> Precision:
    """The same arithmetic under another optimizer; the name of AdamW, the usual one, is not worth a word."""
    label = precision.name if name == "adamw" else f"{precision.name}, {name}"
    return replace(precision, name=label, moments=OPTIMIZER_MOMENTS[name])


@dataclass(frozen=True)
class ZeroLayout:
    """DeepSpeed ZeRO over all ranks. Stage 0 shards nothing, 1 the optimizer, 2 gradients too, 3 weights too."""

    num_ranks: int
    stage: int = 3
    param_offload: bool = False
    optimizer_offload: bool = False
    reduce_bucket: int = 50_000_000  # elements
    prefetch_bucket: int = 50_000_000  # elements
    overlap_buckets: bool = False  # a second reduce bucket, for overlap_comm at stages 1 and 2

    def __str__(self) -> str:
        offloads = " +param offload" * self.param_offload + " +optimizer offload" * self.optimizer_offload
        return f"ZeRO-{self.stage} over {self.num_ranks}{offloads}"


@dataclass(frozen=True)
class MegatronLayout:
    """Megatron-Core: tensor, pipeline (interleaved), context and data parallelism."""

    num_ranks: int
    tp: int = 1
    pp: int = 1
    vpp: int | None = None  # model chunks per stage
    cp: int = 1
    sequence_parallel: bool = True
    distributed_optimizer: bool = True
    num_micro_batches: int = 8  # in flight per optimizer step, at least pp to fill the pipeline
    optimizer_offload: bool = False

    @property
    def dp(self) -> int:
        return self.num_ranks // (self.tp * self.pp * self.cp)

    def __str__(self) -> str:
        parts = [
            f"tp{self.tp}",
            f"pp{self.pp}",
            *([f"vpp{self.vpp}"] if self.vpp else []),
            *([f"cp{self.cp}"] if self.cp > 1 else []),
        ]
        offload = " +optimizer offload" * self.optimizer_offload
        return f"Megatron {' '.join(parts)} dp{self.dp}{offload}"


@dataclass(frozen=True)
class TorchLayout:
    """One process, nothing sharded."""

    num_ranks: int = 1

    def __str__(self) -> str:
        return "plain torch"


Layout = ZeroLayout | MegatronLayout | TorchLayout


ALL_LINEAR = ("all-linear",)


@dataclass(frozen=True)
class Adapter:
    """LoRA; with ``quantization`` of the frozen matrices, QLoRA."""

    rank: int = 16
    targets: tuple[str, ...] = ALL_LINEAR  # matrices of a layer, by the last names of their modules
    quantization: Literal["int8", "nf4"] | None = None
    served: bool = False  # by the engines, beside the base: a swap brings nothing else


@dataclass(frozen=True)
class Kernels:
    """Which intermediate tensors the backward pass needs depends on what is fused."""

    flash_attention: bool = True
    fused_norm: bool = False
    fused_swiglu: bool = False
    dropout: bool = False


EAGER = Kernels()  # transformers' modules with scaled-dot-product attention
EAGER_ATTENTION = Kernels(flash_attention=False)  # the same with a matrix of every token's score for every other
FUSED = Kernels(fused_norm=True, fused_swiglu=True)  # Megatron-Core with Transformer Engine


@dataclass(frozen=True)
class Batch:
    """What goes through a model at once, on one rank."""

    tokens: int  # per micro-batch, padded
    sequence: int  # the longest
    score_tokens: int | None = None  # of a forward-only pass, where no mini-batch cuts; None: as many
    logit_tokens: int | None = None  # whose logits exist at once; None: all, and by plain autograd
    recompute: Recompute = "full"
    recompute_every: int = 1  # so-many-th layers; the others keep everything
    activation_offload: bool = False
    offload_layers: int = 1  # that move together


@dataclass(frozen=True)
class Engine:
    """One SGLang server."""

    tp: int = 1
    num_engines: int = 1
    memory_fraction: float = 0.5  # of a GPU, for weights and KV cache together
    max_sequences: int = 256
    sequence: int = 2048  # longest prompt and response together
    max_cache_tokens: int | None = None  # per engine
    weight_bytes: int = 2
    cache_bytes: float = 2  # a cached element
    cuda_graphs: bool = True
    graph_batch: int = 256  # largest batch a graph is captured for
    prefill_tokens: int = 8192
    sleeps: bool = False  # gives weights and KV cache back between rollouts
    on_own_gpus: bool = False  # disjoint placement: the trainer's memory is elsewhere
    span: int = 1  # machines that one lies on
    own_machines: int = 0  # that have no ranks; 0: engines are on the machines of the ranks


@dataclass(frozen=True)
class Job:
    """Everything a plan depends on."""

    model: ModelShape
    layout: Layout
    batch: Batch
    gpu: Gpu | None = None  # None: everything is in host memory
    algorithm: Algorithm = "grpo"
    precision: Precision = BF16
    kernels: Kernels = EAGER
    adapter: Adapter | None = None
    reference: bool = True
    reference_offload: bool = False
    scores_old_policy: bool = True
    critic: ModelShape | None = None
    critic_layout: Layout | None = None  # None: the actor's, as are its batch and precision
    critic_batch: Batch | None = None
    critic_precision: Precision | None = None
    critic_adapter: Adapter | None = None
    critic_kernels: Kernels | None = None
    reward_model: ModelShape | None = None
    reward_kernels: Kernels | None = None  # None: the actor's
    reward_offload: bool = False
    reward_quantization: Literal["int8", "nf4"] | None = None
    reward_server: Engine | None = None  # one of those that hold the reward model; None: the ranks do
    engine: Engine | None = None
    bucket_bytes: float = 256e6  # two buffers of a weight swap
    host_memory: float | None = None  # bytes of one machine; None: not judged
    ranks_per_node: int = 8
    saves_in_background: bool = False  # from a copy in host memory
    parks: bool = False  # while engines sample, ranks hold the actor's weights alone; the rest is on the host
    rank_share: float | None = None  # of a GPU, for a rank's own tensors; None: all of it
    network_rate: float = NETWORK_RATE  # bytes a second and GPU between machines
    workload: "Workload | None" = None

    @property
    def num_actor_params(self) -> int:
        """Of the model that is trained: a reward model has one output in place of a vocabulary."""
        return self.model.num_params_scalar_head if self.algorithm == "reward_model" else self.model.num_params

    @property
    def has_scoring(self) -> bool:
        return self.algorithm not in ("sft", "reward_model")

    @property
    def swaps_adapter(self) -> bool:
        """Engines have the base, and get nothing else."""
        return self.adapter is not None and self.adapter.served

    @property
    def of_critic(self) -> "Job":
        """The same job as its critic meets it: in its own layout, batch and precision."""
        return replace(
            self,
            layout=self.critic_layout or self.layout,
            batch=self.critic_batch or self.batch,
            precision=self.critic_precision or self.precision,
            adapter=self.critic_adapter,
            kernels=self.critic_kernels or self.kernels,
        )

    @property
    def of_reward_model(self) -> "Job":
        """The same job as its reward model meets it."""
        return replace(self, kernels=self.reward_kernels or self.kernels)


@dataclass(frozen=True)
class Workload:
    """One step's sampling and updates, for the estimate of time."""

    prompts: int = 512
    responses: int = 8  # per prompt
    prompt_tokens: int = 512
    response_tokens: int = 1024
    epochs: int = 1

    @property
    def num_sequences(self) -> int:
        return self.prompts * self.responses

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * (self.prompt_tokens + self.response_tokens)
