"""Rules of the memory levers of one trained model: a knob that changes nothing is a problem."""

from collections.abc import Iterator

from rlhf_mp.config.schema import ModelConfig, TrainedModel, TrainerConfig
from rlhf_mp.errors import Problem


def memory_problems(trained: TrainedModel) -> Iterator[Problem]:
    """Once knobs that follow from others are filled in."""
    yield from _activation_problems(trained)
    if trained.updates.strategy == "deepspeed":
        yield from _disk_problems(trained)


def allocator_problems(trainer: TrainerConfig) -> Iterator[Problem]:
    """What is asked of CUDA's allocator where there is none. With trainer.device=auto a GPU may be elsewhere."""
    untouched = TrainerConfig()
    for name in ("empty_cache_every_n_steps", "per_process_memory_fraction", "memory_snapshot_on_oom"):
        value = getattr(trainer, name)
        if trainer.device == "cpu" and value != getattr(untouched, name):
            yield Problem(f"trainer.{name}", value, "no effect with trainer.device=cpu", "remove it")


def _disk_problems(trained: TrainedModel) -> Iterator[Problem]:
    own, offload, key = trained.updates.deepspeed, trained.updates.fsdp_config, f"{trained.key}.deepspeed"
    if own.nvme_path is not None and own.offload_device == "cpu":
        reason = f"no effect with {key}.offload_device=cpu"
        yield Problem(f"{key}.nvme_path", own.nvme_path, reason, f"{key}.offload_device=nvme")
    if own.offload_device == "cpu":
        return
    if own.nvme_path is None:
        fix = f"{key}.nvme_path=<folder on a local disk>, or {key}.offload_device=cpu"
        yield Problem(f"{key}.offload_device", "nvme", f"{key}.nvme_path is not set", fix)
    if own.zero_stage != 3:
        reason, fix = f"only ZeRO-3 reaches a disk, and {key}.zero_stage = {own.zero_stage}", f"{key}.zero_stage=3"
        yield Problem(f"{key}.offload_device", "nvme", reason, fix)
    elif not (offload.param_offload or offload.optimizer_offload):
        fix = f"{trained.key}.fsdp_config.optimizer_offload=true, or {key}.offload_device=cpu"
        yield Problem(f"{key}.offload_device", "nvme", "no effect: nothing is offloaded", fix)


def _activation_problems(trained: TrainedModel) -> Iterator[Problem]:
    model, key = trained.model, trained.model_key
    every, layers = model.checkpoint_every_n_layers, model.activation_offload_layers
    if every != 1 and not model.enable_gradient_checkpointing:
        yield Problem(
            f"{key}.checkpoint_every_n_layers",
            every,
            f"no effect with {key}.enable_gradient_checkpointing=false",
            f"{key}.enable_gradient_checkpointing=true",
        )
    elif every != 1 and trained.updates.strategy == "megatron":
        yield Problem(
            f"{key}.checkpoint_every_n_layers",
            every,
            f"no effect with {trained.key}.strategy=megatron",
            f"{key}.checkpoint_every_n_layers=1, or {trained.key}.megatron.recompute=selective",
        )
    if model.recompute != "full":
        yield from _selective_problems(trained)
    if layers != ModelConfig().activation_offload_layers and not model.enable_activation_offload:
        yield Problem(
            f"{key}.activation_offload_layers",
            layers,
            f"no effect with {key}.enable_activation_offload=false",
            f"{key}.enable_activation_offload=true",
        )


def _selective_problems(trained: TrainedModel) -> Iterator[Problem]:
    model, key = trained.model, trained.model_key

    def problem(reason: str, fix: str) -> Problem:
        return Problem(f"{key}.recompute", model.recompute, reason, fix)

    if not model.enable_gradient_checkpointing:
        on = f"{key}.enable_gradient_checkpointing"
        yield problem(f"no effect with {on}=false", f"{on}=true")
    elif trained.updates.strategy == "megatron":
        fix = f"{key}.recompute=full {trained.key}.megatron.recompute=selective"
        yield problem(f"no effect with {trained.key}.strategy=megatron", fix)
    elif model.enable_activation_offload:
        reason = "what it keeps stays on the device, whatever enable_activation_offload says"
        yield problem(reason, f"{key}.recompute=full, or {key}.enable_activation_offload=false")
