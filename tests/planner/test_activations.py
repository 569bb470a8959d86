"""Activations against Korthikanti et al., against what real model code keeps, and by conservation laws."""

from dataclasses import replace

import pytest

from rlhf_mp.planner.activations import (
    interleaving,
    layer_items,
    layers_in_flight,
    scoring_activations,
    training_activations,
)
from rlhf_mp.planner.job import EAGER, FUSED, Batch, Kernels, MegatronLayout, TorchLayout, ZeroLayout
from rlhf_mp.planner.known_models import find_model
from rlhf_mp.planner.model_shape import ModelShape

GPT3 = ModelShape("GPT-3", 96, 12288, 96, 96, 128, 4 * 12288, 51200, gated=False, norm_vectors=2, tied=True)
PAPER = Kernels(flash_attention=False, fused_norm=True, dropout=True)  # what the paper counts
S = 2048


def per_token(tp=1, sequence_parallel=False, sequence=S, kernels=PAPER, shape=GPT3):
    return sum(layer_items(shape, kernels, tp=tp, sequence_parallel=sequence_parallel, sequence=sequence).values())


def test_a_gpt_layer_keeps_34_h_and_5_a_s():
    h, a = GPT3.hidden, GPT3.heads
    assert per_token() == 34 * h + 5 * a * S  # arXiv:2205.05198 eq. 1
    assert 5 * a * S / h == 80  # the paper's number for GPT-3


@pytest.mark.parametrize("t", [2, 8])
def test_tensor_parallelism_leaves_10_h_whole_and_sequence_parallelism_nothing(t):
    h, quad = GPT3.hidden, 5 * GPT3.heads * S
    assert per_token(t) == pytest.approx(10 * h + 24 * h / t + quad / t)  # eq. 2
    assert per_token(t, sequence_parallel=True) == pytest.approx((34 * h + quad) / t)  # eq. 4


def test_selective_recomputation_saves_70_percent_of_gpt3():
    batch = Batch(S, S, recompute="none")
    kept = {
        mode: training_activations(GPT3, TorchLayout(), replace(batch, recompute=mode), PAPER, 2, with_logits=False)
        for mode in ("none", "selective")
    }
    last_norm = 8 * GPT3.hidden * S
    share = (kept["selective"].stored.value - last_norm) / (kept["none"].stored.value - last_norm)
    assert 1 - share == pytest.approx(0.70, abs=0.005)  # section 5: "70% for GPT-3"


def test_megatron_lms_coefficient_18_and_4_ffn_over_h():
    # theoretical_memory_usage.py: s b h (18 + 4 ffn / h) a layer; flash attention, dropout, 4-byte logsumexp apart
    shape = replace(GPT3, ffn=40_000)
    items = layer_items(shape, Kernels(fused_norm=True, dropout=True), sequence=S)
    assert sum(items.values()) - 4 * shape.heads == 18 * shape.hidden + 4 * shape.ffn


def test_a_fused_llama_layer_by_hand():
    # Llama-3.1-8B, bytes a token: norms 2 x 2h, inputs 2 x 2h, q 2h, k and v 2 x 2h/4, out 2h + 4 x 32, SwiGLU 3 x 7h
    h = 4096
    by_hand = 4 * h + 4 * h + 2 * h + h + 2 * h + 4 * 32 + 21 * h
    assert sum(layer_items(find_model("llama-3.1-8b"), FUSED).values()) == by_hand == 34 * h + 128


def test_interleaving_costs_what_the_paper_says():
    assert interleaving(8, 3) == 1 + 7 / 24
    assert interleaving(8, None) == 1


@pytest.mark.parametrize(("pp", "vpp", "micro_batches", "layers"), [
    (1, None, 8, 32), (4, None, 8, 32), (4, None, 2, 16), (4, 2, 8, 32 * (1 + 3 / 8)), (8, None, 64, 32),
])  # fmt: skip
def test_a_full_pipelines_first_stage_holds_as_many_layers_as_the_model(pp, vpp, micro_batches, layers):
    layout = MegatronLayout(8, pp=pp, vpp=vpp, num_micro_batches=micro_batches)
    shape = find_model("llama-3.1-8b")
    assert layers_in_flight(shape, layout, last_stage=False) == layers
    assert layers_in_flight(shape, layout, last_stage=True) == 32 / pp


@pytest.mark.parametrize("recompute", ["none", "mlp", "full"])
def test_offload_moves_what_is_stored_and_loses_nothing(recompute):
    shape, batch = find_model("llama-3.1-8b"), Batch(4096, 2048, recompute=recompute)
    at_home = training_activations(shape, TorchLayout(), batch, EAGER, 2)
    away = training_activations(shape, TorchLayout(), replace(batch, activation_offload=True), EAGER, 2)
    assert away.stored.value + away.host.value == pytest.approx(at_home.stored.value)
    assert away.host.value > 0.8 * at_home.stored.value * (30 / 32)
    assert (away.logits, away.working) == (at_home.logits, at_home.working)


@pytest.mark.parametrize(
    "layout", [TorchLayout(), ZeroLayout(8), MegatronLayout(8, tp=2, pp=2), MegatronLayout(8, cp=2)]
)
def test_twice_the_tokens_need_twice_the_memory(layout):
    shape = find_model("qwen2.5-7b")
    small, large = (training_activations(shape, layout, Batch(n, 1024), EAGER, 2) for n in (4096, 8192))
    assert large.peak == pytest.approx(2 * small.peak)


def test_more_recomputation_never_stores_more():
    shape = find_model("qwen3-8b")
    kernels = Kernels(flash_attention=False)
    stored = [
        training_activations(shape, TorchLayout(), Batch(4096, 2048, recompute=mode), kernels, 2).stored.value
        for mode in ("none", "mlp", "full")
    ]
    assert stored == sorted(stored, reverse=True)
    selective = training_activations(shape, TorchLayout(), Batch(4096, 2048, recompute="selective"), kernels, 2)
    assert stored[2] < selective.stored.value < stored[0]


def test_tensor_and_context_parallelism_divide_the_logits():
    shape, batch = find_model("llama-3.1-8b"), Batch(4096, 4096)
    layout = MegatronLayout(8, tp=4, cp=2)
    plan = training_activations(shape, layout, batch, FUSED, 2, last_stage=True)
    assert plan.logits.value == 4096 / 2 * 128_256 * 10 / 4


def test_logits_by_hand():
    # 16,000 tokens x 128,256 x 20 bytes = 41 GB: what no activation figure without logits shows
    shape = find_model("llama-3.1-8b")
    assert training_activations(shape, ZeroLayout(8), Batch(16_000, 2000), EAGER, 2).logits.value == 41_041_920_000
    assert scoring_activations(shape, ZeroLayout(8), Batch(16_000, 2000), EAGER, 2).logits.value == 24_625_152_000
    chunked = training_activations(shape, ZeroLayout(8), Batch(16_000, 2000, logit_tokens=1000), EAGER, 2)
    assert chunked.logits.value == 1000 * 128_256 * 6 + 2 * 128_256 * 4096  # a chunk and the head's gradient
    scored = scoring_activations(shape, ZeroLayout(8), Batch(16_000, 2000, logit_tokens=1000), EAGER, 2)
    assert scored.logits.value == 1000 * 128_256 * 8
    single = training_activations(shape, ZeroLayout(8), Batch(1000, 1000, logit_tokens=1000), EAGER, 2)
    assert single.logits.value == 1000 * 128_256 * 10  # kept, their gradient, and that in bfloat16


def test_a_critic_has_no_logits():
    shape = find_model("llama-3.1-8b")
    assert (
        training_activations(shape, ZeroLayout(8), Batch(16_000, 2000), EAGER, 2, with_logits=False).logits.value == 0
    )
    assert scoring_activations(shape, ZeroLayout(8), Batch(16_000, 2000), EAGER, 2, with_logits=False).logits.value == 0


def test_a_last_pipeline_stage_has_the_logits_and_the_first_has_not():
    shape, layout = find_model("llama-3.1-8b"), MegatronLayout(8, tp=2, pp=4)
    first, last = (
        training_activations(shape, layout, Batch(4096, 4096), FUSED, 2, last_stage=x) for x in (False, True)
    )
    assert first.logits.value == 0 < last.logits.value
    assert first.stored.value > last.stored.value


def test_recomputing_every_second_layer_keeps_half_of_what_the_others_keep():
    shape = find_model("llama-3.1-8b")

    def stored(**how) -> float:
        return training_activations(shape, TorchLayout(), Batch(4096, 2048, **how), EAGER, 2).stored.value

    none, every, second = stored(recompute="none"), stored(), stored(recompute_every=2)
    assert second == pytest.approx((none + every) / 2)


@pytest.mark.parametrize(("layers", "on_gpu"), [(0, 2), (1, 2), (4, 8), (99, 32)])
def test_two_groups_of_layers_are_on_the_gpu_while_the_others_are_away(layers, on_gpu):
    shape = replace(find_model("llama-3.1-8b"), hidden=4096)
    batch = Batch(4096, 2048, recompute="none")
    home = training_activations(shape, TorchLayout(), batch, EAGER, 2).stored.value
    final = 4096 * 8 * 4096  # of the last norm: 4 + 2 x 2 bytes an element
    away = training_activations(
        shape, TorchLayout(), replace(batch, activation_offload=True, offload_layers=layers), EAGER, 2
    )
    assert away.stored.value - final == pytest.approx((home - final) * on_gpu / 32)
