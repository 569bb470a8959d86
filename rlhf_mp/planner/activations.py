"""What the backward pass needs of the forward pass, on one rank and for one micro-batch."""

from dataclasses import dataclass

from rlhf_mp.planner.amount import NOTHING, Amount, amount, larger
from rlhf_mp.planner.job import Batch, Kernels, Layout, MegatronLayout
from rlhf_mp.planner.model_shape import ModelShape

FORWARD_LOGIT_BYTES = 12
"""Per logit of a forward pass, all at once: float32 logits, probabilities and their product (models/logprobs.py)."""
BACKWARD_LOGIT_BYTES = 20
"""Per logit at the worst moment of the backward pass: saved logits, the gather's gradient, three of logsumexp's."""
KEPT_LOGIT_BYTES = 10
"""The same where a micro-batch is a single chunk: float32 logits, kept, their gradient, and that in bfloat16."""
CHUNK_FORWARD_BYTES, CHUNK_BACKWARD_BYTES = 8, 6
"""Per logit of one chunk of several (models/chunked_head.py): two float32 buffers; one, and the gradient in bfloat16.
A gradient through the entropy takes 2 more backward."""


@dataclass(frozen=True)
class ActivationPlan:
    """Bytes of one rank at the worst moment of a micro-batch."""

    stored: Amount  # kept from forward to backward, on the GPU
    working: Amount  # of the layer whose backward pass runs, and of the gradients inside it
    logits: Amount
    host: Amount = NOTHING  # stored in host memory instead

    @property
    def peak(self) -> float:
        """The head's backward pass comes first, the layers' after it: not both at once."""
        return self.stored.value + max(self.logits.value, self.working.value)


def layer_items(
    shape: ModelShape,
    kernels: Kernels,
    *,
    width: int = 2,
    tp: int = 1,
    sequence_parallel: bool = False,
    sequence: int = 0,
) -> dict[str, float]:
    """Bytes per token that one layer keeps, by tensor.

    Args:
        width: bytes of an activation's element.
        sequence: attended tokens, for the attention matrix of kernels without flash attention.

    Source: Korthikanti et al., arXiv:2205.05198 section 4.1, extended to grouped queries and gated MLPs. For a GPT
    layer with dropout it is their 34 h + 5 a s; for transformers' Llama it is what benchmarks/simulate.py counts.
    """
    h, q, f = shape.hidden, shape.q_dim, shape.ffn
    k = shape.kv_dim if kernels.flash_attention else q  # eager attention repeats keys and values for their queries
    replicated = tp if sequence_parallel else 1  # parts that tensor parallelism alone leaves whole
    # transformers' RMSNorm computes in float32: it keeps its float32 input and its normalised output
    norm = width if kernels.fused_norm or shape.norm_vectors == 2 else 4 + width
    items = {
        "norms": shape.norms_per_layer * norm * h / replicated,
        "attention input": width * h / replicated,
        "q, k, v": width * (q + 2 * k) / tp,
        "attention output": (width * q + 4 * shape.heads * kernels.flash_attention) / tp,
        "MLP input": width * h / replicated,
        "MLP inner": width * f * (2 if not shape.gated else 3 if kernels.fused_swiglu else 4) / tp,
    }
    if shape.qk_norm:
        items["q, k norms"] = norm * (q + shape.kv_dim) / tp
    if not kernels.flash_attention:
        per_score = 2 * width + 1 if kernels.dropout else 4 + _copy(width)
        items["attention matrix"] = shape.heads * sequence * per_score / tp
    if kernels.dropout:
        items["dropout masks"] = 2 * h / replicated
    return items


def _copy(width: int) -> int:
    """Bytes a score of eager attention's float32 softmax in the activations' own type."""
    return width if width < 4 else 0


def scores(shape: ModelShape, kernels: Kernels, sequence: int, width: int) -> float:
    """Bytes per token at the worst moment of eager attention's own work: float32 before and after the softmax."""
    return 0 if kernels.flash_attention else shape.heads * sequence * (8 + _copy(width))


def layer_gradients(
    shape: ModelShape,
    kernels: Kernels,
    items: dict[str, float],
    width: int,
    tp: int,
    sequence: int,
    *,
    recomputed: bool,
) -> float:
    """Bytes per token inside the layer whose backward pass runs, beside ``items``: in its MLP, or later at the scores.

    There what the MLP kept is gone, and with it the copy of the softmax.
    """
    mlp = width * (2 * shape.hidden + shape.ffn * (1 if recomputed else 2)) / tp
    if kernels.flash_attention:
        return mlp
    gone = ("MLP input", "MLP inner", "attention output")
    matrix = scores(shape, kernels, sequence, width) - 2 * _copy(width) * shape.heads * sequence
    return max(mlp, matrix / tp - sum(items[name] for name in gone) - items["norms"] / shape.norms_per_layer)


def interleaving(pp: int, vpp: int | None) -> float:
    """How much more an interleaved schedule keeps: 1 + (p - 1) / (p m).

    Source: Korthikanti et al., arXiv:2205.05198 section 4.2.3.
    """
    return 1 + (pp - 1) / (pp * vpp) if vpp else 1.0


def kept_items(
    shape: ModelShape, kernels: Kernels, batch: Batch, items: dict[str, float], width: int, shards: int
) -> float:
    """Bytes per token that a layer keeps whose activations are computed again, as ``batch`` says."""
    dropped = {"selective": ("attention matrix",), "mlp": ("MLP inner",)}.get(batch.recompute, ())
    layer_input = width * shape.hidden / shards
    if batch.recompute == "full":
        return layer_input
    if batch.recompute != "elementwise":
        return sum(size for name, size in items.items() if name not in dropped)
    attention = width * (shape.q_dim + 2 * shape.kv_dim + shape.hidden) + items["attention output"]
    mlp = width * (shape.ffn * (2 if shape.gated else 1) + shape.hidden)
    products = 0 if kernels.flash_attention else width * shape.heads * batch.sequence
    return layer_input + attention + mlp + products


def layers_in_flight(shape: ModelShape, layout: Layout, *, last_stage: bool) -> float:
    """Layers x micro-batches whose activations a rank holds at once."""
    if not isinstance(layout, MegatronLayout) or layout.pp == 1:
        return shape.layers
    own = shape.layers / layout.pp
    if last_stage:
        return own
    if layout.vpp:
        return own * layout.pp * interleaving(layout.pp, layout.vpp)
    return own * min(layout.num_micro_batches, layout.pp)


def training_activations(
    shape: ModelShape,
    layout: Layout,
    batch: Batch,
    kernels: Kernels,
    width: int,
    *,
    last_stage: bool = False,
    with_logits: bool = True,
) -> ActivationPlan:
    """Of a forward and backward pass.

    Args:
        last_stage: of a pipeline; the first stage holds more micro-batches, the last one the logits.
        with_logits: False for a critic or reward model, which has one output instead.
    """
    tp, sequence_parallel, cp = 1, False, 1
    if isinstance(layout, MegatronLayout):
        tp, sequence_parallel, cp = layout.tp, layout.sequence_parallel and layout.tp > 1, layout.cp
    tokens = amount(batch.tokens, "tokens").over(cp, "cp")
    items = layer_items(
        shape, kernels, width=width, tp=tp, sequence_parallel=sequence_parallel, sequence=batch.sequence
    )
    whole = sum(items.values())
    of_layer = kept_items(shape, kernels, batch, items, width, tp if sequence_parallel else 1)
    kept = (of_layer + (batch.recompute_every - 1) * whole) / batch.recompute_every  # of the average layer
    num_layers = layers_in_flight(shape, layout, last_stage=last_stage)
    stored = tokens.times(kept, "bytes a layer").times(num_layers, "layers")
    if not kernels.flash_attention and batch.recompute in ("full", "elementwise"):  # layers get it as an argument
        stored = stored + tokens.times(width * batch.sequence, "bytes of the mask")
    host = NOTHING
    if batch.activation_offload:
        on_gpu = min(2.0 * max(1, batch.offload_layers), num_layers)
        host = tokens.times(kept, "bytes a layer").times(num_layers - on_gpu, "layers")
        stored = tokens.times(kept, "bytes a layer").times(on_gpu, "layers on the GPU")
    inside = layer_gradients(shape, kernels, items, width, tp, batch.sequence, recomputed=batch.recompute == "full")
    again = whole if batch.recompute == "full" else whole - of_layer
    working = tokens.times(again + inside, "bytes recomputed and their gradients")
    at_end = not isinstance(layout, MegatronLayout) or layout.pp == 1 or last_stage
    final = tokens.times((4 + 2 * width) * shape.hidden / (tp if sequence_parallel else 1), "bytes of the last norm")
    logits = NOTHING
    if at_end:
        stored = stored + final
        if with_logits:
            logits = training_logits(shape, layout, batch, width, tokens)
    return ActivationPlan(stored, working, logits, host)


def training_logits(shape: ModelShape, layout: Layout, batch: Batch, width: int, tokens: Amount) -> Amount:
    """Logits of one micro-batch, or of one chunk of it beside the head's gradient, which chunks add up in."""
    each, tp = BACKWARD_LOGIT_BYTES, 1
    if isinstance(layout, MegatronLayout):
        each, tp = KEPT_LOGIT_BYTES, layout.tp
    if batch.logit_tokens is None or batch.logit_tokens >= tokens.value:
        each = each if batch.logit_tokens is None else KEPT_LOGIT_BYTES
        return tokens.times(shape.vocab, "vocabulary").times(each, "bytes").over(tp, "tp")
    chunk = amount(batch.logit_tokens, "tokens a chunk").times(shape.vocab, "vocabulary").over(tp, "tp")
    head = amount(width, "bytes").times(shape.vocab * shape.hidden, "elements of the head's gradient").over(tp, "tp")
    return larger(chunk.times(CHUNK_FORWARD_BYTES, "bytes"), chunk.times(CHUNK_BACKWARD_BYTES, "bytes") + head)


def scoring_activations(
    shape: ModelShape, layout: Layout, batch: Batch, kernels: Kernels, width: int, *, with_logits: bool = True
) -> ActivationPlan:
    """Of a forward pass alone: one layer's tensors at a time, then the logits."""
    tp, cp = (layout.tp, layout.cp) if isinstance(layout, MegatronLayout) else (1, 1)
    whole = sum(layer_items(shape, kernels, width=width, tp=tp, sequence=batch.sequence).values())
    whole = max(whole, scores(shape, kernels, batch.sequence, width) / tp)
    tokens = amount(batch.score_tokens or batch.tokens, "tokens").over(cp, "cp")
    working = tokens.times(whole, "bytes of one layer")
    hidden = tokens.times(2 * width * shape.hidden, "bytes of hidden states")
    columns, each = tokens, FORWARD_LOGIT_BYTES
    if batch.logit_tokens is not None:
        each = CHUNK_FORWARD_BYTES
        if batch.logit_tokens < tokens.value:
            columns = amount(batch.logit_tokens, "tokens a chunk")
    logits = columns.times(shape.vocab, "vocabulary").times(each, "bytes").over(tp, "tp")
    return ActivationPlan(hidden, working, logits if with_logits else NOTHING)
