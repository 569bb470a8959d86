"""The search finds what a single plan confirms, and refuses with reasons."""

from dataclasses import replace
from functools import cache

import pytest

from rlhf_mp.errors import ConfigError
from rlhf_mp.planner.hardware import find_gpu, recognise_gpu
from rlhf_mp.planner.job import OPTIMIZER_MOMENTS, MegatronLayout, Workload, ZeroLayout
from rlhf_mp.planner.known_models import find_model
from rlhf_mp.planner.plan import make_plan
from rlhf_mp.planner.search import Found, Question, layouts, search
from rlhf_mp.planner.search_report import describe_search, search_json

QUESTION = Question(find_model("qwen2.5-32b"), find_gpu("h100"), 16)


@cache
def answer():
    return search(QUESTION)


def test_what_is_found_fits_fastest_first_and_what_is_refused_is_said_why():
    found, refused = answer()
    assert found and refused
    assert all(make_plan(candidate.plan.job).fits for candidate in found)
    seconds = [candidate.time.total for candidate in found]
    assert seconds == sorted(seconds)
    assert all("GiB" in item.reason for item in refused)
    assert {str(c.plan.job.layout) for c in found} & {str(item.layout) for item in refused} == set()


def test_every_layout_is_either_found_or_refused():
    found, refused = answer()
    assert len(found) + len(refused) == len(list(layouts(QUESTION)))


def test_layouts_divide_the_gpus_the_heads_and_the_layers():
    tried = [layout for layout in layouts(QUESTION) if isinstance(layout, MegatronLayout)]
    assert tried
    assert all(layout.dp * layout.tp * layout.pp == 16 and 64 % layout.pp == 0 == 40 % layout.tp for layout in tried)
    assert any(isinstance(layout, ZeroLayout) for layout in layouts(QUESTION))


def test_more_memory_never_loses_a_layout():
    small, _ = search(replace(QUESTION, gpu=find_gpu("a100-80g")))
    large, _ = search(replace(QUESTION, gpu=replace(find_gpu("a100-80g"), memory=find_gpu("h200").memory)))
    assert ways(small) <= ways(large)


def ways(found: list[Found]) -> set[str]:
    """To divide the model. That Megatron steps on the host is no way of its own: it does where nothing else fits."""
    layouts = [candidate.plan.job.layout for candidate in found]
    return {str(replace(x, optimizer_offload=False) if isinstance(x, MegatronLayout) else x) for x in layouts}


def test_what_does_not_fit_under_megatron_is_tried_with_its_optimizer_on_the_host():
    found, _ = search(replace(QUESTION, backends=("megatron",), gpu=find_gpu("a100-80g")))
    plans = [candidate.plan for candidate in found]
    assert {plan.job.layout.optimizer_offload for plan in plans} == {True, False}
    for job in (plan.job for plan in plans if plan.job.layout.optimizer_offload):
        assert not make_plan(replace(job, layout=replace(job.layout, optimizer_offload=False))).fits


def test_nothing_fits_a_70b_model_on_one_small_card():
    question = Question(find_model("llama-3.1-70b"), find_gpu("rtx4090"), 1)
    found, refused = search(question)
    assert found == []
    assert "nothing fits" in describe_search(question, found, refused)


def test_ppo_needs_more_than_grpo_and_sft_less():
    question = replace(QUESTION, gpu=find_gpu("b200"), backends=("deepspeed",))
    answers = [search(replace(question, algorithm=name))[0] for name in ("sft", "grpo", "ppo")]
    peaks = [min(candidate.plan.peak for candidate in found) for found in answers]
    assert peaks == sorted(peaks)


@pytest.mark.parametrize(("changes", "message"), [
    ({"num_gpus": 0}, "nothing runs on no GPU"),
    ({"num_gpus": 12}, "--num-gpus 16"),
    ({"tp": 3}, "--tp 2"),
    ({"pp": 48}, "--pp 16"),
    ({"rollout_tp": 16, "num_gpus": 8}, "--rollout-tp 8"),
    ({"gpus_per_node": 0}, "--gpus-per-node 1"),
    ({"workload": Workload(responses=0)}, "--responses 1"),
    ({"workload": Workload(prompts=-4)}, "--prompts 1"),
    ({"backends": ("deepspeed",), "tp": 2}, "--backend megatron"),
    ({"network_rate": 0.0}, "leave --network-gbit out"),
    ({"price": -1.0}, "leave --price-per-gpu-hour out"),
    ({"model": replace(find_model("gpt-2"), max_context=1024)}, "--response-tokens 512"),
])  # fmt: skip
def test_a_question_that_has_no_answer_names_the_nearest_that_has(changes, message):
    with pytest.raises(ConfigError, match=message):
        search(replace(QUESTION, **changes))


def test_a_given_parallelism_is_kept():
    found, refused = search(replace(QUESTION, tp=8, pp=2, rollout_tp=4))
    assert {str(c.plan.job.layout) for c in found} | {str(r.layout) for r in refused} == {"Megatron tp8 pp2 dp1"}
    assert all(candidate.plan.job.engine.tp == 4 for candidate in found)


def test_the_answer_as_table_and_as_json_agree():
    found, refused = answer()
    record = search_json(QUESTION, found, refused)
    table = describe_search(QUESTION, found, refused)
    assert [entry["layout"] for entry in record["found"]] == [str(c.plan.job.layout) for c in found]
    assert all(entry["layout"] in table for entry in record["found"] + record["refused"])


def test_cards_are_found_by_the_names_people_use():
    assert find_gpu("h100") is find_gpu("NVIDIA H100 80GB") is find_gpu("H100-80G")
    assert find_gpu("4090").memory == 24_564 * 2**20
    with pytest.raises(ConfigError, match="nearest: H200"):
        find_gpu("h2000")


def test_cards_are_recognised_by_what_nvidia_smi_says():
    mib = 2**20
    assert recognise_gpu("NVIDIA H100 80GB HBM3", 81_559 * mib).name == "H100-80G"
    assert recognise_gpu("NVIDIA A100-SXM4-40GB", 40_960 * mib).name == "A100-40G"
    assert recognise_gpu("NVIDIA GeForce RTX 4090", 24_564 * mib).name == "RTX4090"
    assert recognise_gpu("NVIDIA H200", 143_771 * mib).name == "H200"
    assert recognise_gpu("Tesla T4", 15_360 * mib).name == "T4"
    assert recognise_gpu("Tesla V100-SXM2-16GB", 16_384 * mib) is None


def test_a_price_becomes_the_cost_of_a_step_and_of_a_billion_tokens():
    question = replace(QUESTION, price=2.0)
    found, refused = search(question)
    best = found[0]
    # 16 GPUs for the seconds of a step at 2 an hour each
    by_hand = 16 * 2.0 * best.time.total / 3600
    assert search_json(question, found, refused)["found"][0]["cost_per_step"] == pytest.approx(by_hand)
    row = describe_search(question, found, refused).splitlines()[3].split()
    assert float(row[-2]) == pytest.approx(by_hand, rel=5e-3)
    assert float(row[-1].replace(",", "")) == pytest.approx(by_hand / (512 * 8 * 1536) * 1e9, rel=1e-3)
    assert search_json(QUESTION, found, refused)["found"][0]["cost_per_step"] is None


def test_an_optimizer_that_remembers_less_needs_less():
    small = replace(QUESTION, model=find_model("qwen2.5-7b"), num_gpus=8, backends=("megatron",), tp=2, pp=1)
    states = {
        name: next(
            sum(t.bytes for t in c.plan.moments[0].terms if t.label == "actor optimizer moments")
            for c in search(replace(small, optimizer=name))[0]
        )
        for name in OPTIMIZER_MOMENTS
    }
    assert states["adamw"] == 4 * states["adamw-8bit"] == 2 * states["sgd-momentum"] > states["sgd"] == 0


def test_a_slower_network_makes_sharded_training_slower_and_nothing_smaller():
    zero = replace(QUESTION, backends=("deepspeed",))
    fast, slow = (search(replace(zero, network_rate=rate))[0] for rate in (50e9, 5e9))
    assert slow[0].time.total > fast[0].time.total
    assert {str(c.plan.job.layout) for c in slow} == {str(c.plan.job.layout) for c in fast}


def test_a_reward_model_takes_its_place():
    def least(question):
        return min(c.plan.peak for c in search(question)[0])

    question = replace(QUESTION, gpu=find_gpu("b200"), backends=("deepspeed",))
    assert least(replace(question, reward_model=find_model("llama-3.1-8b"))) > least(question)
