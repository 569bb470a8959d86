"""Rules of one trained model's optimizer: knobs of another one, and what a backend cannot step."""

from collections.abc import Iterator

from rlhf_mp.config.schema import OptimConfig, TrainedModel
from rlhf_mp.errors import Problem


def optimizer_problems(trained: TrainedModel) -> Iterator[Problem]:
    optim, key = trained.updates.optim, f"{trained.key}.optim"
    if len(optim.betas) != 2 or max(optim.betas) >= 1:
        reason = "AdamW has two decay rates, each from 0 to below 1"
        yield Problem(f"{key}.betas", optim.betas, reason, f"{key}.betas=[0.9,0.999]")
    if optim.lr_scheduler_type == "constant" and optim.min_lr_ratio > 0:
        yield Problem(
            f"{key}.min_lr_ratio",
            optim.min_lr_ratio,
            f"no effect with {key}.lr_scheduler_type=constant",
            f"{key}.lr_scheduler_type=cosine, or {key}.min_lr_ratio=0",
        )
    yield from _of_another(optim, key)
    if optim.optimizer == "sgd":
        yield from _sgd_problems(trained, key)


def _of_another(optim: OptimConfig, key: str) -> Iterator[Problem]:
    others = {"adamw": ("momentum",), "sgd": ("betas", "eps")}[optim.optimizer]
    for name in others:
        value = getattr(optim, name)
        if value != getattr(OptimConfig(), name):
            yield Problem(f"{key}.{name}", value, f"no effect with {key}.optimizer={optim.optimizer}", "remove it")


def _sgd_problems(trained: TrainedModel, key: str) -> Iterator[Problem]:
    own, fix = trained.updates, f"{key}.optimizer=adamw"
    if own.strategy == "megatron" and own.megatron.use_distributed_optimizer:
        shared = f"{trained.key}.megatron.use_distributed_optimizer"
        reason = f"Megatron's distributed optimizer is Adam ({shared}=true)"
        yield Problem(f"{key}.optimizer", "sgd", reason, f"{shared}=false, or {fix}")
    on_disk = own.deepspeed.offload_device == "nvme" and own.fsdp_config.optimizer_offload
    if own.strategy == "deepspeed" and on_disk:
        device = f"{trained.key}.deepspeed.offload_device"
        reason = f"its state has not been kept on a disk ({device}=nvme)"
        yield Problem(
            f"{key}.optimizer", "sgd", reason, f"{device}=cpu {trained.key}.deepspeed.nvme_path=null, or {fix}"
        )
