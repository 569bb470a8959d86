"""DeepSpeed's JSON from our config, as a pure function."""

from typing import Any

from rlhf_mp.config.schema import DeepSpeedConfig, OffloadConfig, TrainedConfig


def train_config(trained: TrainedConfig, *, dtype: str, on_cpu: bool) -> dict[str, Any]:
    """For a model that is trained: optimizer, offload and ZeRO stage.

    One of our optimizer steps is one of DeepSpeed's: the engine sets the accumulation boundary itself, because
    steps have different numbers of micro-batches.
    """
    return {
        **_common(dtype),
        "zero_optimization": zero_section(trained, trained.fsdp_config),
        "optimizer": optimizer_section(trained, on_cpu=on_cpu),
        "gradient_clipping": trained.grad_clip,  # explicit: DeepSpeed's own default is 1.0, not off
        "zero_allow_untested_optimizer": True,
    }


def optimizer_section(trained: TrainedConfig, *, on_cpu: bool) -> dict[str, Any]:
    optim = trained.optim
    common = {"lr": optim.lr, "weight_decay": optim.weight_decay}
    if optim.optimizer == "sgd":  # torch's; DeepSpeed has none of its own, and steps this one on the host, too
        return {"type": "SGD", "params": common | {"momentum": optim.momentum}}
    params = common | {"betas": list(optim.betas), "eps": optim.eps}
    if on_cpu and not trained.fsdp_config.optimizer_offload:
        # DeepSpeed's "fused" Adam on CPU recomputes its bias correction after a restart and drifts; torch's does not.
        params["torch_adam"] = True
    return {"type": "AdamW", "params": params}


def score_config(trained: TrainedConfig, fsdp: OffloadConfig, *, dtype: str) -> dict[str, Any]:
    """For a frozen model spread over the ranks: ZeRO-3 without an optimizer."""
    section = zero_section(trained, fsdp) | {"stage": 3}
    section.pop("offload_optimizer", None)
    if fsdp.param_offload:
        section["offload_param"] = offload_section(trained.deepspeed)
    return {**_common(dtype), "zero_optimization": section}


def zero_section(trained: TrainedConfig, fsdp: OffloadConfig) -> dict[str, Any]:
    own = trained.deepspeed
    section: dict[str, Any] = {"stage": own.zero_stage, "reduce_bucket_size": own.reduce_bucket_size}
    if own.zero_stage == 3:
        section |= {
            "stage3_prefetch_bucket_size": own.prefetch_bucket_size if fsdp.forward_prefetch else 0,
            "stage3_param_persistence_threshold": own.param_persistence_threshold,
        }
    if own.zero_stage == 3 and fsdp.param_offload:
        section["offload_param"] = offload_section(own)
    if fsdp.optimizer_offload:
        section["offload_optimizer"] = offload_section(own)
    return section


def offload_section(own: DeepSpeedConfig) -> dict[str, Any]:
    """Where an offload keeps what it moves: pinned host memory, or a disk that is read and written through it."""
    place = {"device": own.offload_device, "pin_memory": True}
    return place | ({"nvme_path": own.nvme_path} if own.offload_device == "nvme" else {})


def _common(dtype: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,  # DeepSpeed wants a number; losses are normalised by global counts instead
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": dtype == "bfloat16"},
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
