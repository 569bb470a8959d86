"""Model states against the ZeRO paper, DeepSpeed's estimators, Megatron-LM's script and numbers worked out by hand."""

import pytest

from rlhf_mp.planner.amount import GB, amount
from rlhf_mp.planner.hardware import find_gpu
from rlhf_mp.planner.job import (
    BF16,
    BF16_FP32_GRADS,
    FP32,
    OPTIMIZER_MOMENTS,
    Adapter,
    MegatronLayout,
    TorchLayout,
    ZeroLayout,
    with_optimizer,
)
from rlhf_mp.planner.known_models import find_model
from rlhf_mp.planner.states import (
    base_weights,
    frozen_states,
    gathered_weights,
    lora_params,
    megatron_params,
    megatron_states,
    nf4_bytes,
    padded_vocab,
    reduce_bucket,
    step_transients,
    trained_states,
    whole_gradient,
)
from rlhf_mp.planner.term import Component, Role, total

# arXiv:1910.02054, table 1: GB per device with K = 12, by parameters, data-parallel degree and stage 1, 2, 3
ZERO_TABLE_1 = {
    7.5e9: {1: (120, 120, 120), 4: (52.5, 41.3, 30), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88),
            256: (30.4, 15.4, 0.47), 1024: (30.1, 15.1, 0.12)},
    128e9: {1: (2048, 2048, 2048), 4: (896, 704, 512), 16: (608, 368, 128), 64: (536, 284, 32),
            256: (518, 263, 8), 1024: (513, 257, 2)},
    1e12: {1: (16000, 16000, 16000), 4: (7000, 5500, 4000), 16: (4750, 2875, 1000), 64: (4187, 2218, 250),
           256: (4046, 2054, 62.5), 1024: (4011, 2013, 15.6)},
}  # fmt: skip
CELLS = [
    (p, n, s, v)
    for p, rows in ZERO_TABLE_1.items()
    for n, row in rows.items()
    for s, v in zip((1, 2, 3), row, strict=True)
]

# What megatron/training/theoretical_memory_usage.py (Megatron-LM d98e8a6) prints for weights and optimizer, in bytes
MEGATRON_LM = [
    ("Llama-3.1-8B", 1, 1, 8, True, 60226959360),
    ("Llama-3.1-8B", 4, 1, 2, True, 24093179904),
    ("Llama-3.1-8B", 1, 4, 2, True, 27242803200),
    ("Llama-3.1-8B", 2, 4, 4, True, 10216350720),
    ("Llama-3.1-8B", 8, 4, 2, False, 5109073920),
    ("Llama-3.1-8B", 4, 8, 2, True, 4193654784),
    ("Llama-3.1-70B", 1, 1, 8, True, 529152798720),
    ("Llama-3.1-70B", 4, 1, 2, True, 211672989696),
    ("Llama-3.1-70B", 1, 4, 2, True, 217965158400),
    ("Llama-3.1-70B", 2, 4, 4, True, 81738418176),
    ("Llama-3.1-70B", 8, 4, 2, False, 40873660416),
    ("Llama-3.1-70B", 4, 8, 2, True, 28823138304),
]


def on_gpu(terms):
    return total(terms, on_host=False)


def on_host(terms):
    return total(terms, on_host=True)


@pytest.mark.parametrize(("params", "ranks", "stage", "printed"), CELLS)
def test_table_1_of_the_zero_paper(params, ranks, stage, printed):
    states = trained_states(Role.actor, params, ZeroLayout(ranks, stage), BF16)
    assert on_gpu(states) / GB == pytest.approx(printed, rel=5e-3, abs=6e-3)  # three printed figures, some cut off


@pytest.mark.parametrize(("ranks", "nodes"), [(8, 1), (16, 2), (4, 1)])
def test_without_offload_deepspeeds_estimator_agrees(ranks, nodes):
    stage3 = pytest.importorskip("deepspeed.runtime.zero.stage3")
    stage2 = pytest.importorskip("deepspeed.runtime.zero.stage_1_and_2")
    params, largest = 2_851_000_000, 32_000_000
    _, gpu, _ = stage3.estimate_zero3_model_states_mem_needs(params, largest, ranks // nodes, nodes, cpu_offload=False)
    # theirs: 18 bytes, gradients in float32, and the largest layer's weights and gradients in 16 bits
    ours = on_gpu(trained_states(Role.actor, params, ZeroLayout(ranks, 3), BF16_FP32_GRADS)) + 4 * largest
    assert ours == pytest.approx(gpu, abs=1)
    _, gpu2 = stage2.estimate_zero2_model_states_mem_needs(params, ranks // nodes, nodes, cpu_offload=False)
    # stage 2 of theirs counts the 16-bit gradients too: 2 P + 18 P / N
    ours2 = on_gpu(trained_states(Role.actor, params, ZeroLayout(ranks, 2), BF16_FP32_GRADS)) + 2 * params / ranks
    assert ours2 == pytest.approx(gpu2, abs=1)


@pytest.mark.parametrize("offload_params", [False, True])
def test_with_offload_deepspeeds_estimator_agrees_up_to_the_buffer_it_forgets(offload_params):
    stage3 = pytest.importorskip("deepspeed.runtime.zero.stage3")
    params, ranks = 2_851_000_000, 8
    cpu, _, _ = stage3.estimate_zero3_model_states_mem_needs(
        params, 0, ranks, 1, cpu_offload_params=offload_params, additional_buffer_factor=1
    )
    layout = ZeroLayout(ranks, 3, param_offload=offload_params, optimizer_offload=True)
    states = trained_states(Role.actor, params, layout, BF16)
    flat_gradients = 2 * params  # stage3.py allocates grad_partitions_flat_buffer beside the float32 gradients
    assert on_host(states) * ranks == pytest.approx(cpu + flat_gradients)
    assert on_gpu(states) == (0 if offload_params else 2 * params / ranks)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "precision", [BF16, BF16_FP32_GRADS, *(with_optimizer(BF16, name) for name in OPTIMIZER_MOMENTS)]
)
def test_one_rank_holds_everything_at_every_stage(stage, precision):
    assert on_gpu(trained_states(Role.actor, 1000, ZeroLayout(1, stage), precision)) == precision.total * 1000


def test_deepspeed_keeps_a_second_copy_of_float32_weights():
    # seen in a real run, see benchmarks/results/zero_states.json: 4 + 4 + 4 + 8
    for stage in (1, 2, 3):
        assert on_gpu(trained_states(Role.actor, 1000, ZeroLayout(1, stage), FP32)) == 20_000
    assert on_gpu(trained_states(Role.actor, 1000, ZeroLayout(1, 0), FP32)) == 16_000


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_sharded_adds_up_to_one_copy_over_the_ranks(stage):
    whole = trained_states(Role.actor, 960, ZeroLayout(1, stage), BF16)
    shared = {Component.master: 1, Component.optimizer: 1, Component.gradients: 2, Component.weights: 3}
    for term, alone in zip(trained_states(Role.actor, 960, ZeroLayout(8, stage), BF16), whole, strict=True):
        copies = 1 if stage >= shared[term.component] else 8
        assert term.bytes * 8 == alone.bytes * copies


def test_offload_moves_bytes_and_adds_the_copies_deepspeed_makes():
    # stage 3, bfloat16: 4 master + 8 moments + 4 float32 gradients + 2 gradients on the host, 2 weights on the GPU
    states = trained_states(Role.actor, 100, ZeroLayout(1, 3, optimizer_offload=True), BF16)
    assert (on_host(states), on_gpu(states)) == (1800, 200)
    # stage 2: gradients leave straight into float32, so 4 + 8 + 4
    states = trained_states(Role.actor, 100, ZeroLayout(1, 2, optimizer_offload=True), BF16)
    assert (on_host(states), on_gpu(states)) == (1600, 200)


def test_plain_torch_keeps_all_of_it():
    assert on_gpu(trained_states(Role.actor, 100, TorchLayout(), FP32)) == 1600  # 4 + 4 + 8


@pytest.mark.parametrize(("name", "tp", "pp", "dp", "distributed", "printed"), MEGATRON_LM)
def test_megatron_lms_own_script_prints_the_same(name, tp, pp, dp, distributed, printed):
    shape = find_model(name)
    layout = MegatronLayout(tp * pp * dp, tp, pp, distributed_optimizer=distributed)
    assert layout.dp == dp
    # the script leaves out biases, which Llama has none of, and pads nothing: 128,256 is a multiple of 128
    assert on_gpu(megatron_states(Role.actor, shape, layout, vocab=shape.vocab)) == pytest.approx(printed, rel=1e-9)


def test_megatrons_optimizer_on_the_host_has_master_weights_and_gradients_there():
    shape = find_model("llama-3.1-8b")
    layout = MegatronLayout(4, 2, optimizer_offload=True)
    rank = megatron_params(shape, layout).value
    states = megatron_states(
        Role.actor, shape, layout
    )  # bfloat16: 2 + 4 here, (4 + 8 + 4) / 2 data-parallel ranks there
    assert (on_gpu(states), on_host(states)) == (6 * rank, 16 * rank / 2)
    states = megatron_states(Role.actor, shape, layout, FP32)  # weights on the host are a copy, too
    assert (on_gpu(states), on_host(states)) == (8 * rank, 16 * rank / 2)


def test_megatron_alone_holds_every_parameter():
    shape = find_model("llama-3.1-8b")
    assert megatron_params(shape, MegatronLayout(1)).value == shape.num_params


def test_the_vocabulary_is_padded_to_what_tensor_parallelism_can_split():
    assert padded_vocab(151_936, 1) == 151_936  # 1187 x 128
    assert padded_vocab(151_936, 4) == 151_936  # 128 is a multiple of 4
    assert padded_vocab(1, 8) == 128
    assert padded_vocab(150, 3) == 384  # lcm(128, 3)


def test_frozen_models_are_spread_too():
    (term,) = frozen_states(Role.reference, amount(2, "bytes").times(80, "parameters"), 8, offload=True)
    assert (term.bytes, term.on_host, term.role) == (20, True, Role.reference)


def test_lora_by_hand():
    # Llama-2-7B, rank 16: q, k, v, o are 4096 x 4096, gate, up, down 4096 x 11008; 32 layers
    by_hand = 32 * 16 * (4 * 8192 + 3 * (4096 + 11008))
    shape = find_model("llama-2-7b")
    assert lora_params(shape, Adapter()) == by_hand == 39_976_960
    assert lora_params(shape, Adapter(targets=("q_proj", "v_proj"))) == 32 * 16 * 2 * 8192
    assert lora_params(shape, Adapter(rank=32)) == 2 * by_hand


def test_nf4_is_4_127_bits_with_double_quantization_and_4_5_without():
    assert 8 * nf4_bytes() == pytest.approx(4.127, abs=1e-3)  # QLoRA: 0.127 bits a parameter
    assert 8 * nf4_bytes(double_quantized=False) == 4.5


def test_quantization_leaves_embeddings_and_head_alone():
    shape = find_model("llama-2-7b")
    tables = 2 * 32_000 * 4096 + 65 * 4096  # embedding, head, 65 norms
    expected = nf4_bytes() * (shape.num_params - tables) + 2 * tables
    assert base_weights(shape, Adapter(quantization="nf4")).value == pytest.approx(expected)
    assert base_weights(shape, Adapter()).value == 2 * shape.num_params


def test_gathered_weights_never_exceed_the_model():
    small = find_model("qwen2.5-0.5b")
    (term,) = gathered_weights(Role.actor, small, ZeroLayout(8, 3), BF16)
    assert term.bytes == 2 * small.num_params
    (big,) = gathered_weights(Role.actor, find_model("llama-3.1-70b"), ZeroLayout(8, 3), BF16)
    # the head (128,256 x 8192) is larger than half the reuse distance; one layer and 5e7 elements come on top
    assert big.bytes == 2 * (128_256 * 8192 + 855_654_400 + 50_000_000)


@pytest.mark.parametrize("layout", [ZeroLayout(8, 2), ZeroLayout(1, 3), MegatronLayout(8, 2), TorchLayout()])
def test_only_sharded_weights_are_gathered(layout):
    assert gathered_weights(Role.actor, find_model("llama-2-7b"), layout, BF16) == []


def test_buckets_and_whole_gradients_by_hand():
    shape = find_model("llama-2-7b")
    assert on_gpu(reduce_bucket(Role.actor, ZeroLayout(8, 3, reduce_bucket=1000), BF16)) == 2000
    assert on_gpu(reduce_bucket(Role.actor, ZeroLayout(8, 2, reduce_bucket=1000, overlap_buckets=True), BF16)) == 4000
    assert on_gpu(whole_gradient(Role.actor, shape, ZeroLayout(8, 3), BF16)) == 2 * 32_000 * 4096
    assert (
        reduce_bucket(Role.actor, TorchLayout(), BF16) == whole_gradient(Role.actor, shape, TorchLayout(), BF16) == []
    )


def test_the_optimizer_step_needs_float32_gradients_of_one_sub_group():
    assert on_gpu(step_transients(Role.actor, 8e9, ZeroLayout(4, 3), BF16)) == 4e9  # 2e9 a rank, 1e9 at once
    assert on_gpu(step_transients(Role.actor, 8e9, ZeroLayout(16, 3), BF16)) == 2e9  # 5e8 a rank
    assert step_transients(Role.actor, 8e9, ZeroLayout(4, 3), FP32) == []


def test_marketing_gigabytes_are_not_the_cards_memory():
    assert find_gpu("h100").memory / GB == pytest.approx(85.52, abs=0.01)  # 81,559 MiB
