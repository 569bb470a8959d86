"""DeepSpeed's JSON: every knob arrives where DeepSpeed reads it, and nothing is left to its defaults that matters."""

import pytest

from rlhf_mp.config.schema import ActorConfig, DeepSpeedConfig, OffloadConfig, OptimConfig
from rlhf_mp.train.deepspeed_config import score_config, train_config

IN_HOST_MEMORY = {"device": "cpu", "pin_memory": True}


def actor(stage: int = 3, **knobs) -> ActorConfig:
    deepspeed = DeepSpeedConfig(stage, reduce_bucket_size=11, prefetch_bucket_size=22, param_persistence_threshold=33)
    return ActorConfig(deepspeed=deepspeed, **knobs)


def zero(config: ActorConfig) -> dict:
    return train_config(config, dtype="bfloat16", on_cpu=False)["zero_optimization"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_stage_is_the_one_asked_for(stage):
    assert zero(actor(stage))["stage"] == stage


def test_bucket_sizes_arrive_and_those_of_stage_3_only_there():
    assert zero(actor(2)) == {"stage": 2, "reduce_bucket_size": 11}
    assert zero(actor(3)) == {
        "stage": 3,
        "reduce_bucket_size": 11,
        "stage3_prefetch_bucket_size": 22,
        "stage3_param_persistence_threshold": 33,
    }


def test_without_forward_prefetch_nothing_is_fetched_ahead():
    assert zero(actor(fsdp_config=OffloadConfig(forward_prefetch=False)))["stage3_prefetch_bucket_size"] == 0


@pytest.mark.parametrize("param", [False, True])
@pytest.mark.parametrize("optimizer", [False, True])
def test_each_part_is_offloaded_when_its_own_switch_says_so(param, optimizer):
    section = zero(actor(3, fsdp_config=OffloadConfig(param_offload=param, optimizer_offload=optimizer)))
    assert section.get("offload_param") == (IN_HOST_MEMORY if param else None)
    assert section.get("offload_optimizer") == (IN_HOST_MEMORY if optimizer else None)


def test_on_a_disk_both_offloads_are_told_where():
    config = actor(3, fsdp_config=OffloadConfig(param_offload=True, optimizer_offload=True))
    config.deepspeed.offload_device, config.deepspeed.nvme_path = "nvme", "/local"
    on_disk = {"device": "nvme", "pin_memory": True, "nvme_path": "/local"}
    assert zero(config)["offload_param"] == zero(config)["offload_optimizer"] == on_disk
    scored = score_config(config, OffloadConfig(param_offload=True), dtype="bfloat16")
    assert scored["zero_optimization"]["offload_param"] == on_disk


def test_parameters_stay_whole_below_stage_3():
    assert "offload_param" not in zero(actor(2, fsdp_config=OffloadConfig(param_offload=True)))


def test_the_optimizer_is_adamw_with_our_numbers():
    optim = OptimConfig(lr=0.5, betas=[0.1, 0.2], eps=0.3, weight_decay=0.4)
    config = train_config(actor(optim=optim), dtype="bfloat16", on_cpu=False)
    expected = {"lr": 0.5, "betas": [0.1, 0.2], "eps": 0.3, "weight_decay": 0.4}
    assert config["optimizer"] == {"type": "AdamW", "params": expected}


def test_sgd_is_torchs_wherever_it_steps():
    optim = OptimConfig(lr=0.5, optimizer="sgd", momentum=0.8, weight_decay=0.4)
    for offload in (OffloadConfig(), OffloadConfig(optimizer_offload=True)):
        config = train_config(actor(optim=optim, fsdp_config=offload), dtype="float32", on_cpu=True)
        expected = {"lr": 0.5, "momentum": 0.8, "weight_decay": 0.4}
        assert config["optimizer"] == {"type": "SGD", "params": expected}


@pytest.mark.parametrize(
    ("on_cpu", "offload", "expected"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_torchs_adam_stands_in_only_for_the_cpu_one_that_does_not_resume(on_cpu, offload, expected):
    config = actor(fsdp_config=OffloadConfig(optimizer_offload=offload))
    params = train_config(config, dtype="float32", on_cpu=on_cpu)["optimizer"]["params"]
    assert ("torch_adam" in params) == expected


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_clipping_is_written_even_when_it_is_off(clip):
    """Left out, DeepSpeed would clip at 1."""
    assert train_config(actor(grad_clip=clip), dtype="float32", on_cpu=False)["gradient_clipping"] == clip


@pytest.mark.parametrize(("dtype", "enabled"), [("bfloat16", True), ("float32", False)])
def test_bfloat16_is_switched_by_the_models_type(dtype, enabled):
    assert train_config(actor(), dtype=dtype, on_cpu=False)["bf16"] == {"enabled": enabled}
    assert score_config(actor(), OffloadConfig(), dtype=dtype)["bf16"] == {"enabled": enabled}


@pytest.mark.parametrize("stage", [0, 3])
def test_a_frozen_model_is_always_partitioned_and_has_no_optimizer(stage):
    config = score_config(actor(stage), OffloadConfig(param_offload=True, optimizer_offload=True), dtype="bfloat16")
    assert config["zero_optimization"]["stage"] == 3
    assert config["zero_optimization"]["offload_param"] == IN_HOST_MEMORY
    assert "offload_optimizer" not in config["zero_optimization"] and "optimizer" not in config


def test_the_reference_offloads_by_its_own_switch_not_by_the_actors():
    trained = actor(fsdp_config=OffloadConfig(param_offload=True))
    assert "offload_param" not in score_config(trained, OffloadConfig(), dtype="bfloat16")["zero_optimization"]
