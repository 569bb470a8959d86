"""What a rank keeps of a model between steps: weights, gradients, master weights, moments, on GPU and host."""

import math

from rlhf_mp.planner.amount import Amount, amount, larger, smaller
from rlhf_mp.planner.job import (
    ALL_LINEAR,
    BF16_FP32_GRADS,
    Adapter,
    Job,
    Layout,
    MegatronLayout,
    Precision,
    TorchLayout,
    ZeroLayout,
)
from rlhf_mp.planner.model_shape import ModelShape
from rlhf_mp.planner.term import Component, Role, Term

SUB_GROUP = 10**9
"""Elements whose float32 gradients exist at once in ZeRO-3's optimizer step (DeepSpeed's sub_group_size)."""
REUSE_DISTANCE = 10**9
"""Elements within which ZeRO-3 keeps a weight whole for its next use (DeepSpeed's stage3_max_reuse_distance)."""

SAME_SIDES = {
    "out_proj": "o_proj", "dense": "o_proj", "fc1": "up_proj", "fc2": "down_proj",
    "dense_h_to_4h": "up_proj", "dense_4h_to_h": "down_proj",
}  # fmt: skip
"""Matrices of other architectures, by what Llama's of the same size are called."""


def trained_states(role: Role, num_params: float, layout: Layout, precision: Precision) -> list[Term]:
    """Of parameters that are all trained. For Megatron see ``megatron_states``, which needs the model's shape."""
    if isinstance(layout, TorchLayout):
        layout = ZeroLayout(1, stage=0)
    assert isinstance(layout, ZeroLayout)
    stage, ranks = layout.stage, layout.num_ranks

    def share(bytes_each: float, from_stage: int) -> Amount:
        whole = amount(bytes_each, "bytes").times(num_params, "parameters")
        return whole.over(ranks if stage >= from_stage else 1, "ranks")

    offload = layout.optimizer_offload
    master = precision.master or (4 if stage >= 1 else 0)  # DeepSpeed steps on a copy, of float32 weights too
    terms = [
        Term(role, Component.weights, share(precision.weights, 3), layout.param_offload),
        Term(role, Component.gradients, share(precision.gradients, 2), offload and stage >= 2),
        Term(role, Component.master, share(master, 1), offload),
        Term(role, Component.optimizer, share(precision.moments, 1), offload),
    ]
    if offload and stage == 2:  # gradients leave bucket by bucket, straight into float32
        terms[1] = Term(role, Component.gradients, share(4, 2), True)
    elif offload:  # DeepSpeed steps on a float32 copy of them
        terms.append(Term(role, Component.gradients, share(4, 1), True))
    return [term for term in terms if term.bytes]


def checkpoint_copy(role: Role, trained: list[Term], layout: Layout) -> Term:
    """In host memory, what is still to be written of a checkpoint while training goes on (train/snapshot.py).

    ZeRO-3 writes no weights but their master copy, and no backend its gradients.
    """
    written = {Component.weights, Component.master, Component.optimizer}
    if isinstance(layout, ZeroLayout) and layout.stage == 3:
        written.remove(Component.weights)
    copied = [term for term in trained if term.component in written]
    names = " + ".join(term.component.value for term in copied)
    return Term(role, Component.checkpoint, Amount(sum(t.bytes for t in copied), f"a copy of {names}"), on_host=True)


def reduce_bucket(role: Role, layout: Layout, precision: Precision) -> list[Term]:
    """The buffer gradients are reduced in; DeepSpeed allocates it in full at start and keeps it."""
    if not isinstance(layout, ZeroLayout) or layout.stage == 0:
        return []
    elements = layout.reduce_bucket * (2 if layout.overlap_buckets and layout.stage < 3 else 1)
    return [
        Term(role, Component.buckets, amount(precision.gradients, "bytes").times(elements, "elements of the bucket"))
    ]


def whole_gradient(role: Role, shape: ModelShape, layout: Layout, precision: Precision) -> list[Term]:
    """The largest gradient, whole on every rank until it is reduced. Where gradients are not sharded it is theirs."""
    if not isinstance(layout, ZeroLayout) or layout.stage < 2:
        return []
    largest = amount(precision.gradients, "bytes").times(shape.largest_module, "elements of the largest gradient")
    return [Term(role, Component.buckets, largest)]


def gathered_weights(role: Role, shape: ModelShape, layout: Layout, precision: Precision) -> list[Term]:
    """ZeRO-3's whole weights around the layer at work; nothing for other layouts.

    Source: DeepSpeed 0.19, runtime/zero/partitioned_param_coordinator.py: a weight stays for its next use if that is
    near enough, and the next ones are fetched ahead.
    """
    if not isinstance(layout, ZeroLayout) or layout.stage != 3 or (layout.num_ranks == 1 and not layout.param_offload):
        return []
    each = amount(precision.weights, "bytes")
    kept = amount(max(shape.largest_module, REUSE_DISTANCE // 2), "elements kept for reuse or largest")
    live = kept + amount(shape.layer_params, "in the layer") + amount(layout.prefetch_bucket, "prefetched")
    live = smaller(live, amount(shape.num_params, "parameters"))
    return [Term(role, Component.gathered, Amount(each.value * live.value, f"{each.formula} x ({live.formula})"))]


def step_transients(role: Role, num_params: float, layout: Layout, precision: Precision) -> list[Term]:
    """Float32 gradients of the part that the optimizer is changing, when they are not kept."""
    if not isinstance(layout, ZeroLayout) or layout.optimizer_offload or precision.gradients == 4:
        return []
    own = amount(num_params, "parameters").over(layout.num_ranks if layout.stage >= 1 else 1, "ranks")
    part = smaller(own, amount(SUB_GROUP, "in a sub-group"))
    return [Term(role, Component.buckets, Amount(4 * part.value, f"4 bytes x {part.formula}"))]


def megatron_params(shape: ModelShape, layout: MegatronLayout, *, vocab: int | None = None) -> Amount:
    """Elements on the fullest rank: the first stage, with the embedding (and the head when it is the last too).

    Norms are replicated over tensor parallelism, everything else is split.

    Source: Megatron-LM, megatron/training/theoretical_memory_usage.py, with the biases it leaves out.
    """
    vocab = vocab or padded_vocab(shape.vocab, layout.tp)
    split = amount(shape.linear_params, "in layers").over(layout.tp, "tp").over(layout.pp, "pp")
    norms = amount(shape.norm_params, "in norms").over(layout.pp, "pp")
    tables = 1 + (layout.pp == 1 and not shape.tied)
    return (
        split + norms + amount(vocab * shape.hidden, "of the vocabulary").times(tables, "tables").over(layout.tp, "tp")
    )


def padded_vocab(vocab: int, tp: int) -> int:
    """Rounded up as train/megatron_bridge.py does: to 128, and so that tensor parallelism splits it evenly."""
    multiple = math.lcm(128, tp)
    return -(-vocab // multiple) * multiple


def megatron_states(
    role: Role,
    shape: ModelShape,
    layout: MegatronLayout,
    precision: Precision = BF16_FP32_GRADS,
    *,
    vocab: int | None = None,
) -> list[Term]:
    """In bfloat16 18 bytes per parameter of the rank, or 6 + 12 / (dp x cp) with the distributed optimizer.

    An optimizer that steps on the host has master weights there in any case, and what it needs of the gradients.
    """
    params = megatron_params(shape, layout, vocab=vocab)
    shards = layout.dp * layout.cp if layout.distributed_optimizer else 1

    def each(bytes_each: float, shards: int = 1) -> Amount:
        return Amount(bytes_each * params.value, f"{bytes_each:g} bytes x ({params.formula})").over(
            shards, "data-parallel ranks"
        )

    offload = layout.optimizer_offload
    master = precision.master or (4 if offload else 0)
    terms = [
        Term(role, Component.weights, each(precision.weights)),
        Term(role, Component.gradients, each(precision.gradients)),
        Term(role, Component.master, each(master, shards), offload),
        Term(role, Component.optimizer, each(precision.moments, shards), offload),
    ]
    if offload:
        terms.append(Term(role, Component.gradients, each(4, shards), True))
    return [term for term in terms if term.bytes]  # float32 weights are their own master copy


def frozen_states(role: Role, weights: Amount, num_ranks: int, offload: bool) -> list[Term]:
    """Weights that are only read, spread over the ranks."""
    return [Term(role, Component.weights, weights.over(num_ranks, "ranks"), offload)]


def lora_params(shape: ModelShape, adapter: Adapter) -> int:
    """Elements of all adapters: rank x (rows + columns) for each matrix.

    Raises:
        KeyError: a target that is no matrix of any known architecture.
    """
    h, q, k, f = shape.hidden, shape.q_dim, shape.kv_dim, shape.ffn
    sides = {"q_proj": h + q, "k_proj": h + k, "v_proj": h + k, "o_proj": q + h, "up_proj": h + f, "down_proj": f + h}
    if shape.gated:
        sides["gate_proj"] = h + f
    fused = {"qkv_proj": h + q + 2 * k, "query_key_value": h + q + 2 * k, "gate_up_proj": h + 2 * f}
    chosen = sides if adapter.targets == ALL_LINEAR else adapter.targets
    known = sides | fused | {other: sides[name] for other, name in SAME_SIDES.items()}
    return shape.layers * adapter.rank * sum(known[name] for name in chosen)


def nf4_bytes(*, double_quantized: bool = True, block: int = 64, second_block: int = 256) -> float:
    """Per parameter: 4 bits and a share of its block's scale (float32, or 8 bits and a share of a second scale).

    Source: QLoRA, arXiv:2305.14314 section 3.
    """
    scale = 8 / block + 32 / (block * second_block) if double_quantized else 32 / block
    return (4 + scale) / 8


def base_weights(shape: ModelShape, adapter: Adapter, width: float = 2) -> Amount:
    """The frozen model under adapters; embeddings, norms and head keep their type when its matrices are quantized.

    Args:
        width: bytes of an element that is not quantized.
    """
    if adapter.quantization is None:
        return amount(width, "bytes").times(shape.num_params, "parameters")
    each = nf4_bytes() if adapter.quantization == "nf4" else 1 + 4 / shape.hidden  # int8: a float32 scale per row
    rest = shape.num_params - shape.linear_params
    quantized = amount(each, "bytes").times(shape.linear_params, f"{adapter.quantization} parameters")
    return quantized + amount(width, "bytes").times(rest, "other parameters")


def dequantized(shape: ModelShape) -> Amount:
    """The one quantized matrix that is unpacked to be used."""
    largest = larger(amount(shape.hidden * shape.ffn, "elements"), amount(shape.hidden * shape.q_dim, "elements"))
    return largest.times(2, "bytes")


def swapped_params(job: Job) -> int:
    """Elements of what engines get."""
    return lora_params(job.model, job.adapter) if job.swaps_adapter else job.model.num_params


def merged(shape: ModelShape) -> Amount:
    """The one matrix to which its adapter is added, in float32."""
    return amount(4, "bytes").times(max(shape.hidden * shape.ffn, shape.hidden * shape.q_dim), "of the largest matrix")
