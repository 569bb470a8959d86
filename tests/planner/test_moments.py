"""Plans of whole jobs: conservation, who is awake when, and that every printed number is its printed arithmetic."""

import re
from dataclasses import replace

import pytest

from rlhf_mp.phase import Phase
from rlhf_mp.planner.amount import GIB
from rlhf_mp.planner.hardware import CONTEXT, GPUS, USABLE, find_gpu
from rlhf_mp.planner.inference import cache_bytes_per_token
from rlhf_mp.planner.job import (
    BF16,
    BF16_FP32_GRADS,
    FP32,
    FUSED,
    Adapter,
    Batch,
    Engine,
    Job,
    MegatronLayout,
    TorchLayout,
    Workload,
    ZeroLayout,
)
from rlhf_mp.planner.known_models import find_model
from rlhf_mp.planner.plan import ENGINE_PROCESSES, RANK_PROCESS, RAY_PROCESSES, make_plan
from rlhf_mp.planner.report import as_json, describe, explain
from rlhf_mp.planner.term import Component, Role
from rlhf_mp.planner.throughput import step_time

LLAMA = find_model("llama-3.1-8b")
GRPO = Job(
    LLAMA, ZeroLayout(8), Batch(16384, 2048, logit_tokens=1024), find_gpu("h100"), engine=Engine(tp=2, num_engines=4)
)
JOBS = {
    "grpo": GRPO,
    "offload": replace(GRPO, layout=ZeroLayout(8, param_offload=True, optimizer_offload=True), reference_offload=True),
    "ppo": replace(GRPO, algorithm="ppo", critic=LLAMA, reward_model=LLAMA),
    "served": replace(
        GRPO,
        algorithm="ppo",
        critic=LLAMA,
        reward_model=LLAMA,
        reward_server=Engine(tp=2, max_cache_tokens=8192, max_sequences=0, cuda_graphs=False),
    ),
    "served apart": replace(
        GRPO,
        engine=Engine(tp=8, on_own_gpus=True),
        reward_model=LLAMA,
        reward_server=Engine(max_cache_tokens=8192, max_sequences=0, cuda_graphs=False, on_own_gpus=True),
    ),
    "asleep": replace(GRPO, engine=Engine(tp=2, num_engines=4, sleeps=True)),
    "apart": replace(GRPO, engine=Engine(tp=8, on_own_gpus=True)),
    "sft": replace(GRPO, algorithm="sft", engine=None, reference=False),
    "lora": replace(GRPO, layout=ZeroLayout(8), adapter=Adapter()),
    "lora served": replace(GRPO, layout=ZeroLayout(8), adapter=Adapter(served=True)),
    "qlora": replace(GRPO, layout=TorchLayout(), adapter=Adapter(quantization="nf4"), algorithm="sft", engine=None),
    "megatron": replace(GRPO, layout=MegatronLayout(8, 2, 2), precision=BF16_FP32_GRADS, kernels=FUSED),
    "megatron vpp cp": replace(
        GRPO, layout=MegatronLayout(16, 2, 2, vpp=2, cp=2, optimizer_offload=True), precision=BF16_FP32_GRADS
    ),
    "cpu": replace(GRPO, gpu=None, precision=FP32, engine=Engine(max_cache_tokens=5000), host_memory=64 * GIB),
}
EVERY_JOB = pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)


def phase_bytes(job, phase, **changes):
    return make_plan(replace(job, **changes)).peak_of(phase).gpu_bytes


@EVERY_JOB
def test_every_formula_evaluates_to_its_number(job):
    for moment in make_plan(job).moments:
        for term in moment.terms:
            arithmetic = term.amount.formula.replace(",", "").replace(" x ", " * ")
            arithmetic = re.sub(r"\b[A-Za-z][\w'-]*", "", arithmetic)
            assert eval(arithmetic) == pytest.approx(term.bytes, rel=1e-6), f"{term.label}: {term.amount.formula}"


@EVERY_JOB
def test_nothing_is_negative_and_totals_are_sums(job):
    plan = make_plan(job)
    for moment in plan.moments:
        assert all(term.bytes >= 0 for term in moment.terms)
        assert moment.gpu_bytes + moment.host_bytes == pytest.approx(sum(term.bytes for term in moment.terms))


@EVERY_JOB
def test_reports_show_every_phase_and_term(job):
    plan = make_plan(job)
    explained = explain(plan)
    for moment in plan.moments:
        assert moment.name in explained
        assert all(term.amount.formula in explained for term in moment.terms)
    assert all(m.phase.value in describe(plan) for m in plan.moments)
    record = as_json(plan)
    assert [m["gpu_bytes"] for m in record["moments"]] == [m.gpu_bytes for m in plan.moments]


def test_the_phases_of_each_algorithm():
    def phases(name):
        return {m.phase for m in make_plan(JOBS[name]).moments}

    assert phases("sft") == {Phase.train}
    assert phases("grpo") == phases("ppo") == set(Phase)
    names = [m.name for m in make_plan(JOBS["ppo"]).moments]
    assert {"values", "reward model", "critic backward", "reference log-probs"} <= set(names)


def test_grpo_by_hand():
    """Llama-3.1-8B on 8 H100, ZeRO-3, between steps: 16 bytes a parameter over 8 ranks, and the reference's 2."""
    plan = make_plan(JOBS["sft"])
    resident = sum(t.bytes for t in plan.moments[0].terms if t.component in (
        Component.weights, Component.gradients, Component.master, Component.optimizer))  # fmt: skip
    assert resident == 16 * 8_030_261_248 / 8
    sampling = make_plan(GRPO).peak_of(Phase.rollout)
    engine = {t.component: t.bytes for t in sampling.terms if t.role is Role.engine}
    assert engine[Component.weights] == 2 * 8_030_261_248 / 2
    # half of an H100 less two contexts, less the weights
    assert engine[Component.kv_cache] == 0.5 * (find_gpu("h100").memory - 2 * CONTEXT) - 8_030_261_248


def test_a_sleeping_engine_frees_its_memory_outside_of_rollout_and_its_cache_in_sync():
    awake, asleep = make_plan(GRPO), make_plan(JOBS["asleep"])
    cache = next(t.bytes for t in awake.moments[0].terms if t.component is Component.kv_cache)
    engine = sum(t.bytes for t in awake.moments[0].terms if t.role is Role.engine)
    assert awake.peak_of(Phase.rollout).gpu_bytes == asleep.peak_of(Phase.rollout).gpu_bytes
    assert awake.peak_of(Phase.train).gpu_bytes - asleep.peak_of(Phase.train).gpu_bytes == pytest.approx(engine)
    assert awake.peak_of(Phase.sync).gpu_bytes - asleep.peak_of(Phase.sync).gpu_bytes == pytest.approx(cache)


def test_a_sleeping_engine_keeps_a_base_that_no_swap_brings_again():
    asleep = replace(JOBS["lora"], engine=replace(GRPO.engine, sleeps=True))
    keeps = replace(asleep, adapter=Adapter(served=True))
    whole, kept = (make_plan(job).peak_of(Phase.train).gpu_bytes for job in (asleep, keeps))
    assert kept - whole == pytest.approx(2 * LLAMA.num_params / 2)  # bytes of a weight, tensor parallel 2


def test_ranks_that_park_hold_the_actors_weights_alone_while_engines_sample_and_a_copy_on_the_host():
    """PPO: 2 bytes a parameter of 18 of the actor stay; of gradients nothing is copied; the others go whole."""
    kept = replace(JOBS["ppo"], engine=replace(JOBS["ppo"].engine, sleeps=True))
    plain, parked = make_plan(kept), make_plan(replace(kept, parks=True))
    for phase in (Phase.rollout, Phase.sync):
        before, after = (plan.peak_of(phase) for plan in (plain, parked))
        gone = [t for t in before.terms if not t.on_host and t not in after.terms]
        assert {(t.role, t.component) for t in gone} >= {
            (Role.actor, Component.optimizer), (Role.actor, Component.master), (Role.actor, Component.gradients),
            (Role.critic, Component.weights), (Role.reference, Component.weights),
        }  # fmt: skip
        left = {(t.role, t.component) for t in after.terms if t.role is not Role.engine and not t.on_host}
        assert (Role.actor, Component.weights) in left and (Role.actor, Component.optimizer) not in left
        scratch = sum(t.bytes for t in gone if t.component in (Component.gradients, Component.buckets))
        copied = sum(t.bytes for t in gone) - scratch
        assert after.host_bytes - before.host_bytes == pytest.approx(copied)
    train = plain.peak_of(Phase.train), parked.peak_of(Phase.train)
    assert train[0].gpu_bytes == train[1].gpu_bytes and train[0].host_bytes < train[1].host_bytes  # room is kept


def test_what_is_on_the_host_anyway_is_not_parked_but_without_gpus_that_is_everything():
    offloaded = replace(JOBS["offload"], engine=replace(GRPO.engine, sleeps=True), parks=True)
    on_gpu, on_cpu = (make_plan(replace(offloaded, gpu=gpu)).peak_of(Phase.rollout) for gpu in (GRPO.gpu, None))
    parked = [{t.component for t in moment.terms if t.role is Role.actor} for moment in (on_gpu, on_cpu)]
    assert Component.optimizer in parked[0] and Component.parked not in parked[0]
    assert parked[1] == {Component.weights, Component.parked}


def test_a_served_reward_model_is_on_no_rank_and_awake_in_every_phase():
    scalar = LLAMA.num_params - 128_256 * 4_096 + 4_096
    for moment in make_plan(JOBS["served"]).moments:
        assert Role.reward_model not in {t.role for t in moment.terms}
        held = {t.component: t.bytes for t in moment.terms if t.role is Role.reward_server}
        assert held[Component.weights] == 2 * scalar / 2  # bytes, over tp 2
        assert held[Component.kv_cache] == 8192 * cache_bytes_per_token(LLAMA, 2, 2).value
    ranks, served = (make_plan(JOBS[name]).peak_of(Phase.score) for name in ("ppo", "served"))
    assert "reward model" in {m.name for m in make_plan(JOBS["ppo"]).moments}
    assert {t.bytes for t in ranks.terms if t.role is Role.reward_model} == {2 * scalar / 8}
    contexts = [t.bytes for t in served.terms if t.component is Component.context]
    assert contexts == [3 * CONTEXT]  # of a rank, its engine and the reward server


def test_a_reward_server_on_gpus_of_its_own_is_a_moment_of_its_own():
    roles = {moment.name: {t.role for t in moment.terms} for moment in make_plan(JOBS["served apart"]).moments}
    assert roles.pop("a reward server scores") == {Role.reward_server, Role.process}
    assert all(Role.reward_server not in others for others in roles.values())


def test_a_machine_holds_each_reward_server_once():
    """On a CPU all of them are host memory: what the ranks don't hold, times the servers, and their programs."""
    cpu = replace(JOBS["cpu"], layout=ZeroLayout(4), ranks_per_node=4)
    server = Engine(num_engines=2, max_cache_tokens=100, max_sequences=0, cuda_graphs=False, weight_bytes=4)
    served = make_plan(replace(cpu, reward_model=LLAMA, reward_server=server))
    held = sum(t.bytes for t in served.worst.terms if t.role is Role.reward_server)
    assert served.host_per_node == pytest.approx(make_plan(cpu).host_per_node + 2 * (held + ENGINE_PROCESSES))


def test_what_servers_hold_is_not_of_a_ranks_share():
    tight = replace(GRPO, rank_share=0.1)
    server = Engine(tp=2, max_cache_tokens=8192, max_sequences=0, cuda_graphs=False)
    alone, beside = (
        [reason for reason in make_plan(job).problems if "trainer.per_process_memory_fraction=0.1" in reason]
        for job in (tight, replace(tight, reward_model=LLAMA, reward_server=server))
    )
    assert len(alone) == 1 and alone == beside


@pytest.mark.parametrize(("kind", "bits"), [("nf4", 4 + 8 / 64 + 32 / (64 * 256)), ("int8", 8 + 32 / LLAMA.hidden)])
def test_a_reward_model_in_fewer_bits(kind, bits):
    whole, packed = (
        next(
            t.bytes
            for t in make_plan(replace(JOBS["ppo"], layout=TorchLayout(), reward_quantization=quantization))
            .moments[0]
            .terms
            if t.role is Role.reward_model
        )
        for quantization in (None, kind)
    )
    linear, rest = LLAMA.linear_params, LLAMA.num_params_scalar_head - LLAMA.linear_params
    assert whole == 2 * LLAMA.num_params_scalar_head
    assert packed == pytest.approx(linear * bits / 8 + 2 * rest)


def test_disjoint_engines_do_not_see_the_trainer_and_the_trainer_not_them():
    plan = make_plan(JOBS["apart"])
    assert {t.role for t in plan.peak_of(Phase.rollout).terms} == {Role.engine, Role.process}
    for phase in (Phase.score, Phase.train, Phase.sync):
        assert Role.engine not in {t.role for t in plan.peak_of(phase).terms}


def test_two_stages_of_offload_move_bytes_from_gpu_to_host():
    def both(**offload):
        moment = make_plan(replace(JOBS["sft"], layout=ZeroLayout(8, **offload))).peak_of(Phase.train)
        return moment.gpu_bytes, moment.host_bytes

    (gpu0, host0), (gpu1, host1) = both(), both(optimizer_offload=True)
    gpu2, host2 = both(optimizer_offload=True, param_offload=True)
    assert gpu0 > gpu1 > gpu2 and host0 == 0 < host1 < host2
    share = 8_030_261_248 / 8
    assert gpu0 - gpu1 == pytest.approx(14 * share)  # 2 gradients, 4 master, 8 moments
    assert host1 == pytest.approx(18 * share)  # and the float32 gradients, see test_states
    assert gpu1 - gpu2 == host2 - host1 == pytest.approx(2 * share)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_more_ranks_never_need_more_memory_each(stage):
    peaks = [make_plan(replace(JOBS["sft"], layout=ZeroLayout(n, stage))).peak for n in (2, 4, 8, 16, 64)]
    assert peaks == sorted(peaks, reverse=True)


def test_lora_trains_a_fraction_and_qlora_shrinks_the_base():
    def states(name):
        terms = make_plan(JOBS[name]).peak_of(Phase.train).terms
        return sum(t.bytes for t in terms if t.role is Role.actor and t.component in (
            Component.weights, Component.gradients, Component.master, Component.optimizer))  # fmt: skip

    one = replace(JOBS["lora"], layout=TorchLayout())
    JOBS_ONE = {t.component: t.bytes for t in make_plan(one).peak_of(Phase.train).terms}
    assert JOBS_ONE[Component.optimizer] == 8 * 32 * 16 * (2 * 8192 + 2 * 5120 + 3 * 18432)  # Adam of the adapters only
    assert states("qlora") < 0.4 * 2 * LLAMA.num_params  # 4.127 bits instead of 16


def test_what_does_not_fit_says_by_how_much_and_what_is_largest():
    plan = make_plan(replace(GRPO, batch=Batch(65536, 2048)))
    assert not plan.fits
    over = (plan.peak - find_gpu("h100").memory * USABLE) / GIB
    assert f"{over:,.2f} GiB too much; largest: actor logits" in plan.problems[0]
    assert "does not fit" in describe(plan)


def test_a_cache_too_small_for_one_response_is_a_problem():
    plan = make_plan(replace(GRPO, engine=Engine(tp=2, num_engines=4, memory_fraction=0.05)))
    assert plan.cache_tokens == 0  # a twentieth of the card is less than the weights
    assert any("KV cache has room for 0 tokens" in problem for problem in plan.problems)


def test_host_memory_is_judged_per_machine():
    job = replace(JOBS["offload"], host_memory=100 * GIB)
    assert "host memory" in make_plan(job).problems[0]
    assert make_plan(replace(job, host_memory=500 * GIB)).fits
    two_machines = replace(job, layout=ZeroLayout(16, param_offload=True, optimizer_offload=True))
    two_machines = replace(two_machines, engine=Engine(tp=2, num_engines=8))
    # twice the ranks hold half as much each: a machine holds half of the states, and as many programs as before
    assert make_plan(two_machines).host_per_node < 0.6 * make_plan(job).host_per_node


def test_without_a_gpu_everything_is_in_host_memory():
    plan = make_plan(JOBS["cpu"])
    assert all(moment.gpu_bytes == 0 for moment in plan.moments)
    assert plan.peak == max(moment.host_bytes for moment in plan.moments)


def test_the_kv_cache_of_grouped_queries_by_hand():
    # 32 layers x 2 (key, value) x 8 heads x 128 x 2 bytes = 131,072 bytes a token; a head is not split at tp 16
    assert cache_bytes_per_token(LLAMA, 1, 2).value == 131_072
    assert cache_bytes_per_token(LLAMA, 4, 2).value == 131_072 / 4
    assert cache_bytes_per_token(LLAMA, 16, 2).value == 131_072 / 8
    # documents count every query head: 32 x 2048 tokens of it are 34.4 GB; with grouped queries 8.6 GB
    assert 32 * 2048 * cache_bytes_per_token(LLAMA, 1, 2).value == pytest.approx(8.59e9, rel=1e-3)


@pytest.mark.parametrize("name", GPUS)
def test_a_larger_card_never_refuses_what_a_smaller_one_takes(name):
    smaller = GPUS[name]
    job = replace(JOBS["sft"], gpu=smaller)
    if make_plan(job).fits:
        assert all(make_plan(replace(job, gpu=g)).fits for g in GPUS.values() if g.memory >= smaller.memory)


def test_bfloat16_states_are_two_bytes_lighter_than_with_float32_gradients():
    assert BF16_FP32_GRADS.total - BF16.total == 2


def test_engines_on_machines_of_their_own_take_nothing_of_the_ranks():
    engine = Engine(max_cache_tokens=5000, num_engines=6, own_machines=2)
    plan = make_plan(replace(JOBS["cpu"], layout=ZeroLayout(1), ranks_per_node=1, engine=engine))

    def held(moment, is_engine: bool) -> float:
        return sum(term.bytes for term in moment.terms if (term.role is Role.engine) is is_engine)

    of_ranks = max(held(moment, False) for moment in plan.moments) + RANK_PROCESS
    of_engines = 3 * (max(held(moment, True) for moment in plan.moments) + ENGINE_PROCESSES)
    assert plan.host_per_node == pytest.approx(max(of_ranks, of_engines) + RAY_PROCESSES)


def test_a_machine_holds_its_part_of_an_engine_that_lies_on_two():
    """Half of its workers, but programs of its own."""

    def on_two_machines(**changes):
        engine = Engine(tp=2, max_cache_tokens=5000, **changes)
        return make_plan(replace(JOBS["cpu"], layout=ZeroLayout(2), ranks_per_node=1, engine=engine))

    one_each, over_both = on_two_machines(num_engines=2), on_two_machines(num_engines=1, span=2)
    worker = sum(term.bytes for term in one_each.worst.terms if term.role is Role.engine)
    assert one_each.host_per_node - over_both.host_per_node == pytest.approx(worker)  # of two, one is left


def test_where_engines_serve_the_adapter_a_swap_merges_and_moves_nothing_else():
    def swap(job):
        (moment,) = (moment for moment in make_plan(job).moments if moment.phase is Phase.sync)
        return {(term.component, term.bytes) for term in moment.terms}

    merged, served = swap(JOBS["lora"]), swap(JOBS["lora served"])
    table = 128_256 * 4096
    assert (Component.sync_bucket, 2 * table + JOBS["lora"].bucket_bytes / 2) in merged
    assert (Component.sync_bucket, JOBS["lora served"].bucket_bytes) in served
    adapter = (
        16 * 32 * (2 * 8192 + 2 * 5120 + 3 * 18432)
    )  # rank, layers, rows and columns of q, o; k, v; gate, up, down
    assert [size for component, size in served if component is Component.gathered] == [2 * adapter]
    assert len([component for component, _ in merged if component is Component.gathered]) == 2
    load = Workload(prompts=512, responses=8)
    seconds = [step_time(make_plan(job), load).seconds[Phase.sync] for job in (JOBS["lora"], JOBS["lora served"])]
    assert seconds[1] == pytest.approx(seconds[0] * adapter / LLAMA.num_params, rel=1e-6)
