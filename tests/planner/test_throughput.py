"""Arithmetic against published utilisation, and the roofline's limits."""

from dataclasses import replace

import pytest

from rlhf_mp.phase import Phase
from rlhf_mp.planner.hardware import find_gpu
from rlhf_mp.planner.job import FUSED, Batch, Engine, Job, MegatronLayout, Workload, ZeroLayout
from rlhf_mp.planner.known_models import find_model
from rlhf_mp.planner.model_shape import ModelShape
from rlhf_mp.planner.plan import make_plan
from rlhf_mp.planner.throughput import LINK_EFFICIENCY, TRAIN_EFFICIENCY, forward_flops, step_time, training_flops

# arXiv:2205.05198, tables 3 and 5: heads, hidden, layers, global batch, GPUs, seconds an iteration, MFU in percent
# (A100, 312 TFLOP/s; 2048 tokens a sequence, vocabulary 51,200)
KORTHIKANTI = {
    "22B": (64, 6144, 48, 4, 8, 1.10, 41.5),
    "175B": (96, 12288, 96, 64, 64, 13.75, 51.4),
    "530B": (128, 20480, 105, 280, 280, 37.83, 56.0),
    "1T": (160, 25600, 128, 512, 512, 71.49, 56.3),
}
LLAMA = find_model("llama-3.1-8b")
JOB = Job(LLAMA, ZeroLayout(8), Batch(16384, 1536), find_gpu("h100"), engine=Engine(tp=1, num_engines=8))
LOAD = Workload(prompts=512, responses=8)


def gpt(heads, hidden, layers):
    return ModelShape("GPT", layers, hidden, heads, heads, hidden // heads, 4 * hidden, 51200, gated=False, tied=True)


@pytest.mark.parametrize("name", KORTHIKANTI)
def test_published_utilisation_is_recomputed(name):
    heads, hidden, layers, batch, gpus, seconds, printed = KORTHIKANTI[name]
    flops = training_flops(gpt(heads, hidden, layers), 2048, causal=False) * batch * 2048
    assert 100 * flops / (seconds * gpus * 312e12) == pytest.approx(printed, rel=5e-3)


@pytest.mark.parametrize(("heads", "hidden", "layers", "percent"), [(96, 12288, 96, 2.7), (128, 20480, 105, 1.6)])
def test_attention_has_the_share_of_arithmetic_that_the_paper_states(heads, hidden, layers, percent):
    shape = gpt(heads, hidden, layers)
    attention = training_flops(shape, 2048, causal=False) - training_flops(shape, 0)
    assert 100 * attention / training_flops(shape, 2048, causal=False) == pytest.approx(percent, rel=0.03)


def test_forward_flops_by_hand():
    # Llama-3.1-8B: 2 a weight but not of the embedding, 128,256 x 4096; attention 32 layers x 4 x 4096 x 2048 / 2
    weights = 8_030_261_248 - 128_256 * 4096 - 65 * 4096  # norms are no matrix products
    assert forward_flops(LLAMA, 2048) == 2 * weights + 32 * 4 * 4096 * 2048 / 2


def test_a_full_recomputation_is_one_more_forward_pass():
    assert training_flops(LLAMA, 2048, recompute="full") / training_flops(LLAMA, 2048) == pytest.approx(4 / 3)


def test_arithmetic_alone_reaches_the_assumed_efficiency():
    # one rank of data parallelism, large batches, an infinitely fast memory for the optimizer: nothing else is left
    gpu = replace(find_gpu("h100"), memory=1e13, memory_rate=1e30)
    job = replace(JOB, gpu=gpu, layout=ZeroLayout(1, 0), batch=Batch(16384, 1536, recompute="none"), engine=None)
    time = step_time(make_plan(replace(job, algorithm="sft")), LOAD)
    assert time.train_mfu == pytest.approx(TRAIN_EFFICIENCY)


def test_every_phase_takes_time_and_they_add_up():
    time = step_time(make_plan(JOB), LOAD)
    assert all(time.seconds[phase] > 0 for phase in Phase)
    assert time.total == pytest.approx(sum(time.seconds.values()))
    assert time.tokens_per_second * time.total == pytest.approx(512 * 8 * 1536)
    assert 0 < time.train_mfu < 1


def slower(**changes):
    return step_time(make_plan(replace(JOB, **changes)), LOAD).total > step_time(make_plan(JOB), LOAD).total


def test_what_ranks_hand_over_travels_to_the_host_before_sampling_and_back_after():
    # Llama-3.1-8B over 8 ranks: master weights and both moments, 12 bytes a parameter, and a reference's 2
    sleeping = replace(JOB, engine=replace(JOB.engine, sleeps=True))
    kept, parked = (step_time(make_plan(replace(sleeping, parks=parks)), LOAD) for parks in (False, True))
    one_way = 14 * 8_030_261_248 / 8 / (63e9 * 0.7)
    for phase in Phase:
        extra = one_way if phase in (Phase.rollout, Phase.sync) else 0
        assert parked.seconds[phase] - kept.seconds[phase] == pytest.approx(extra)


def test_offload_recomputation_small_batches_and_slow_cards_cost_time():
    assert slower(layout=ZeroLayout(8, optimizer_offload=True))
    assert slower(batch=Batch(1536, 1536))
    assert slower(gpu=find_gpu("a100"))
    assert slower(critic=LLAMA, algorithm="ppo")
    whole = replace(JOB, batch=Batch(16384, 1536, recompute="none"))
    assert step_time(make_plan(whole), LOAD).seconds[Phase.train] < step_time(make_plan(JOB), LOAD).seconds[Phase.train]


def test_a_pipeline_bubble_shrinks_with_micro_batches_and_interleaving():
    def train(**layout):
        job = replace(JOB, layout=MegatronLayout(8, pp=4, **layout), kernels=FUSED)
        return step_time(make_plan(job), LOAD).seconds[Phase.train]

    assert train(num_micro_batches=4) > train(num_micro_batches=16) > train(num_micro_batches=16, vpp=2)


def test_decoding_is_bound_by_the_weights_when_few_sequences_run():
    # one sequence, one card: reading 16 GB of weights 1,024 times at 65% of 3.35e12 bytes a second, 4 ms on top of each
    job = replace(JOB, engine=Engine(tp=1, num_engines=1))
    time = step_time(make_plan(job), Workload(1, 1, 512, 1024)).seconds[Phase.rollout]
    cache = 1024 * 131_072  # 512 + 1024 / 2 tokens on average
    expected = 1024 * ((2 * LLAMA.num_params + cache) / (0.65 * 3.35e12) + 0.004)
    assert time == pytest.approx(expected, rel=0.02)


def test_an_engine_on_several_machines_waits_for_the_network():
    def rollout(span):
        job = replace(JOB, engine=Engine(tp=2, num_engines=1, span=span))
        return step_time(make_plan(job), Workload(1, 1, 512, 1024)).seconds[Phase.rollout]

    # 512 tokens of prompt and 1,024 of response, 32 layers, two sums of 4,096 elements of 2 bytes in each, both ways
    moved = (512 + 1024) * 32 * 2 * 4096 * 2 * 2
    assert rollout(2) - rollout(1) == pytest.approx(moved / (JOB.network_rate * LINK_EFFICIENCY), rel=1e-6)


def test_utilization_falls_with_the_tokens_of_a_micro_batch():
    card = replace(find_gpu("h100"), memory=1e13)
    shares = [
        step_time(make_plan(replace(JOB, gpu=card, layout=ZeroLayout(8, 2), batch=Batch(tokens, 512))), LOAD).train_mfu
        for tokens in (512, 1024, 2048, 4096)
    ]
    assert shares == sorted(shares) and shares[0] < 0.75 * shares[-1]


@pytest.mark.parametrize("layout", [ZeroLayout, lambda gpus: MegatronLayout(gpus, tp=8, pp=gpus // 8)])
def test_twice_the_gpus_are_less_than_twice_as_fast(layout):
    def speed(gpus):
        job = replace(JOB, layout=layout(gpus), batch=Batch(4096, 1536), engine=Engine(tp=1, num_engines=gpus))
        return step_time(make_plan(job), LOAD).tokens_per_second

    gains = [speed(2 * gpus) / speed(gpus) for gpus in (8, 16, 32)]
    assert all(gain < 2 for gain in gains)
    assert speed(64) / speed(8) < 0.9 * 8  # over eight machines
