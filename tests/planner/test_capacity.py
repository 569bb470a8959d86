"""What fits a card and what a model needs."""

import pytest

from rlhf_mp.planner.amount import GB, GIB
from rlhf_mp.planner.capacity import (
    METHODS,
    describe_fits,
    describe_needs,
    fewest_gpus,
    spread_job,
    what_fits,
    what_needs,
)
from rlhf_mp.planner.hardware import USABLE, find_gpu
from rlhf_mp.planner.instances import INSTANCES, PROVIDERS, describe_instances, smallest_instance
from rlhf_mp.planner.known_models import find_model
from rlhf_mp.planner.plan import make_plan


@pytest.mark.parametrize("size", [8 * GB, 24 * GB, 80 * GIB])
def test_everything_listed_fits_and_the_largest_comes_first(size):
    for plans in what_fits(size).values():
        sizes = [plan.job.model.num_params for plan in plans]
        assert sizes == sorted(sizes, reverse=True)
        assert all(plan.peak <= USABLE * size for plan in plans)


def test_a_larger_card_takes_all_a_smaller_one_takes_and_qlora_all_that_lora_takes():
    def names(size, method):
        return {plan.job.model.name for plan in what_fits(size)[method]}

    for method in METHODS:
        assert names(12 * GB, method) <= names(24 * GB, method) <= names(80 * GB, method)
    assert names(24 * GB, "full") <= names(24 * GB, "LoRA") <= names(24 * GB, "QLoRA")


def test_full_training_needs_at_least_16_bytes_a_parameter():
    shape = find_model("llama-2-13b")
    needs = {need.method: need.plan.peak for need in what_needs(shape)}
    assert needs["full"] > 16 * shape.num_params > needs["LoRA"] > 2 * shape.num_params > needs["QLoRA"]


def test_no_70b_model_trains_by_lora_in_80_gb():
    # its bfloat16 weights alone are 138 GB; document 002 prints 80 GB
    assert find_model("llama-2-70b") not in [plan.job.model for plan in what_fits(80 * GB)["LoRA"]]


@pytest.mark.parametrize("method", METHODS)
def test_the_fewest_gpus_are_enough_and_half_of_them_are_not(method):
    shape, gpu = find_model("llama-2-13b"), find_gpu("a100-40g")
    count = fewest_gpus(shape, METHODS[method], gpu)
    assert count == {"full": 8, "LoRA": 1, "QLoRA": 1}[method]


def test_a_card_too_small_for_any_model_says_so():
    assert "none of" in describe_fits(1 * GB)


def test_tables_name_both_units():
    assert "GiB" in describe_fits(24 * GB) and "GB" in describe_fits(24 * GB)
    assert "GiB = " in describe_needs(find_model("llama-2-13b"))


def test_the_smallest_machine_of_a_cloud_is_enough_and_every_smaller_one_is_not():
    shape = find_model("llama-2-13b")
    for provider in PROVIDERS:
        for method, adapter in METHODS.items():
            found = smallest_instance(shape, method, provider)
            if found is None:
                continue
            size = find_gpu(found.gpu).memory * found.num_gpus
            for other in (i for i in INSTANCES if i.provider == provider):
                fits = make_plan(spread_job(shape, adapter, find_gpu(other.gpu), other.num_gpus)).fits
                assert fits or other != found
                assert not fits or find_gpu(other.gpu).memory * other.num_gpus >= size


def test_instances_are_of_cards_the_planner_knows_and_a_405b_model_needs_several():
    assert all(find_gpu(instance.gpu).name == instance.gpu for instance in INSTANCES)
    assert smallest_instance(find_model("llama-3.1-405b"), "full", "AWS") is None
    assert "more than one machine" in describe_instances(find_model("llama-3.1-405b"))
