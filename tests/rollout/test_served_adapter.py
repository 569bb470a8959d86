"""What an engine knows of its adapter before it has any: from the checkpoint's headers and the config alone."""

import dataclasses

from rlhf_mp.config.schema import ModelConfig
from rlhf_mp.rollout.served_adapter import NAME, adapter_arguments, plan_adapter, tensors_of, write_empty
from rlhf_mp.rollout.sglang_server import Address


def test_each_adapted_matrix_has_two_tensors_under_pefts_names(tiny_checkpoint, tmp_path):
    model = ModelConfig(str(tiny_checkpoint), lora_rank=4, lora_alpha=12, target_modules=["q_proj", "v_proj"])
    plan = plan_adapter(model)
    assert (plan.rank, plan.alpha, plan.modules) == (4, 12, ("q_proj", "v_proj"))
    assert sorted(plan.tensors) == sorted(
        f"base_model.model.model.layers.{layer}.self_attn.{name}_proj.lora_{part}.weight"
        for layer in range(4)
        for name in "qv"
        for part in "AB"
    )
    write_empty(plan, tmp_path / "adapter")
    assert tensors_of(tmp_path / "adapter") == list(plan.tensors)
    all_linear = plan_adapter(dataclasses.replace(model, target_modules=["all-linear"]))
    assert len(all_linear.tensors) == 7 * 4 * 2 and set(plan.tensors) < set(all_linear.tensors)


def test_a_server_is_told_of_one_adapter_and_requests_name_it(tiny_checkpoint, tmp_path):
    plan = plan_adapter(ModelConfig(str(tiny_checkpoint), lora_rank=4))
    on_gpu = adapter_arguments(plan, tmp_path, on_cpu=False)
    assert on_gpu["lora-paths"] == [f"{NAME}={tmp_path}"] and "lora-backend" not in on_gpu
    assert adapter_arguments(plan, tmp_path, on_cpu=True) == on_gpu | {"lora-backend": "torch_native"}
    assert Address("http://a", "key", NAME).asked == {"lora_path": NAME}
    assert Address("http://a", "key").asked == {}
