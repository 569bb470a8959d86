"""Real model code at full size without the memory: one forward and backward on tensors that have only shapes.

  python -m benchmarks.simulate qwen2.5-3b llama-3.1-8b qwen2.5-32b llama-3.1-70b \\
      --json benchmarks/results/simulated_activations.json

Storages are counted as they come and go, so this is the peak of the code that trains, at any size, on any machine.
"""

import argparse
import itertools
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.record import add_results_option, provenance, write_results
from rlhf_mp.models.chunked_head import LOGIT_BYTES, Scoring
from rlhf_mp.models.logprobs import run_model
from rlhf_mp.observe.live_bytes import LiveBytes
from rlhf_mp.planner.activations import training_activations
from rlhf_mp.planner.job import EAGER, Batch, Recompute, TorchLayout
from rlhf_mp.planner.known_models import find_model
from rlhf_mp.planner.model_shape import ModelShape
from rlhf_mp.train.checkpointing import checkpoint_layers


@dataclass(frozen=True)
class Simulated:
    """Bytes on one device, without weights."""

    saved: int  # kept for the backward pass, logits left out
    forward_peak: int  # of one forward and loss, what is kept included
    backward_peak: int  # of all that is alive at once, gradients of the weights left out


def build(shape: ModelShape, kind: str, recompute: Recompute, attention: str) -> torch.nn.Module:
    """A bfloat16 model of ``shape`` from transformers' own ``kind`` classes, built under the active fake mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        tie_word_embeddings=shape.tied,
        use_cache=False,
        sliding_window=None,
        pad_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
    if recompute != "none":
        checkpoint_layers(model, every=1, recompute="selective" if recompute == "elementwise" else "full")
    return model.train()


def simulate(
    shape: ModelShape,
    kind: str,
    *,
    sequences: int,
    length: int,
    recompute: Recompute,
    chunk: int | None = None,
    attention: str = "sdpa",
) -> Simulated:
    """One micro-batch of ``sequences`` x ``length`` tokens through the trainer's own log-probs, and back.

    Args:
        chunk: tokens whose logits exist at once; None: all.
    """
    # Whether sequences are packed is read from tensor values, which do not exist here; they are not packed.
    unpacked = patch("transformers.masking_utils.find_packed_sequence_indices", return_value=None)
    with FakeTensorMode(allow_non_fake_inputs=True), unpacked:
        model = build(shape, kind, recompute, attention)
        tokens = torch.zeros(sequences, length, dtype=torch.long)
        for parameter in model.parameters():  # as under ZeRO: a gradient leaves as soon as it is whole
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        known = [*model.parameters(), *model.buffers()]
        with LiveBytes(known) as live:
            hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state  # what the head keeps
            kept = live.now
        del hidden
        with LiveBytes(known) as live:
            loss = _loss(model, tokens, chunk)
            forward_peak, live.peak = live.peak, live.now
            loss.backward()
    return Simulated(kept, forward_peak, live.peak)


def _loss(model: torch.nn.Module, tokens: torch.Tensor, chunk: int | None) -> torch.Tensor:
    chunk_bytes = (chunk or 0) * LOGIT_BYTES * model.config.vocab_size
    inputs = {"input_ids": tokens, "use_cache": False}
    return run_model(model, inputs, tokens, Scoring(1.0, entropy_grad=False, chunk_bytes=chunk_bytes))[0].sum()


NOTE = (
    "Gradients of tensors without data are added out of place: where chunks of logits are small beside the head's "
    "gradient the simulation holds a third copy of it, which a real run does not."
)
KINDS = {"llama": "llama", "qwen2.5": "qwen2", "qwen3": "qwen3", "mistral": "mistral"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="known names of Llama, Qwen2.5, Qwen3 or Mistral models")
    parser.add_argument("--tokens", type=int, default=4096, help="of the micro-batch")
    parser.add_argument("--length", type=int, default=2048, help="tokens a sequence")
    add_results_option(parser)
    args = parser.parse_args()
    measured_on, records = provenance(), []
    for name in args.models:
        shape = find_model(name)
        kind = next(value for prefix, value in KINDS.items() if shape.name.lower().startswith(prefix))
        for recompute, chunk in itertools.product(("none", "elementwise", "full"), (None, 1024)):
            records.append(compare(shape, kind, args.tokens, args.length, recompute, chunk))
            print(" ".join(f"{key}={value}" for key, value in records[-1].items()), flush=True)
    write_results(args.json, {"provenance": measured_on, "note": NOTE, "cells": records})


def compare(shape: ModelShape, kind: str, tokens: int, length: int, recompute: Recompute, chunk: int | None) -> dict:
    """Planned and simulated bytes of one micro-batch."""
    batch = Batch(tokens, length, logit_tokens=chunk, recompute=recompute)
    planned = training_activations(shape, TorchLayout(), batch, EAGER, 2)
    real = simulate(shape, kind, sequences=tokens // length, length=length, recompute=recompute, chunk=chunk)
    return {
        "model": shape.name,
        "tokens": tokens,
        "recompute": recompute,
        "logit_chunk_tokens": chunk,
        "planned_saved_bytes": planned.stored.value,
        "simulated_saved_bytes": real.saved,
        "saved_difference": planned.stored.value / real.saved - 1,
        "planned_peak_bytes": planned.peak,
        "simulated_peak_bytes": real.backward_peak,
        "peak_difference": planned.peak / real.backward_peak - 1,
    }


if __name__ == "__main__":
    main()
