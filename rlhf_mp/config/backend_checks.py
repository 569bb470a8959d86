"""Rules of one trained model and its backend: the same for the actor and the critic."""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import asdict, replace

from rlhf_mp.config import megatron_checks
from rlhf_mp.config.attention_checks import attention_problems
from rlhf_mp.config.derive import has_critic
from rlhf_mp.config.memory_checks import allocator_problems, memory_problems
from rlhf_mp.config.optimizer_checks import optimizer_problems
from rlhf_mp.config.schema import DeepSpeedConfig, MegatronConfig, OffloadConfig, RunConfig, TrainedModel
from rlhf_mp.errors import Problem

UNTOUCHED = {
    "deepspeed": (DeepSpeedConfig(), DeepSpeedConfig(zero_stage=3)),
    "megatron": (MegatronConfig(), MegatronConfig(sequence_parallel=False)),
}
"""Sections that only one backend reads, as they are when nobody has written one, unset knobs filled in or not."""


def written_problems(config: RunConfig, given: AbstractSet[str]) -> Iterator[Problem]:
    """Contradictions and knobs without effect in what somebody wrote, before knobs are filled in."""
    complete = replace(config, critic=replace(config.critic, enable=has_critic(config)))
    for trained in complete.trained:
        strategy = trained.updates.strategy or config.actor_rollout_ref.actor.strategy  # unset: the actor's
        yield from _written_problems(trained, strategy, given)


def _written_problems(trained: TrainedModel, strategy: str, given: AbstractSet[str]) -> Iterator[Problem]:
    updates = trained.updates
    reshard, stage = f"{trained.key}.fsdp_config.reshard_after_forward", f"{trained.key}.deepspeed.zero_stage"
    if {reshard, stage} <= given and updates.fsdp_config.reshard_after_forward != (updates.deepspeed.zero_stage == 3):
        says = str(updates.fsdp_config.reshard_after_forward).lower()
        yield Problem(
            stage,
            updates.deepspeed.zero_stage,
            f"{reshard}={says} says otherwise: true is ZeRO-3, false ZeRO-2",
            "keep only one of the two",
        )
    for backend, untouched in UNTOUCHED.items():
        section = getattr(updates, backend)
        if strategy != backend and section not in untouched:
            yield Problem(
                f"{trained.key}.{backend}",
                asdict(section),
                f"no effect with {trained.key}.strategy={strategy}",
                f"remove the section, or {trained.key}.strategy={backend}",
            )
    if strategy == "megatron":
        yield from megatron_checks.written_problems(trained)


def backend_problems(config: RunConfig) -> Iterator[Problem]:
    """Rules of every trained model, once knobs that follow from others are filled in."""
    for trained in config.trained:
        updates = trained.updates
        yield from memory_problems(trained)
        if updates.strategy == "torch":
            yield from _torch_problems(trained, config.trainer.num_ranks)
        elif updates.strategy == "megatron":
            yield from megatron_checks.megatron_problems(trained, config.trainer)
        else:
            yield from _zero_problems(trained)
        yield from optimizer_problems(trained)
        yield from _offload_problems(f"{trained.key}.fsdp_config", updates.fsdp_config, trained)
    yield from attention_problems(config)
    yield from allocator_problems(config.trainer)
    actor, reference = config.trained[0], config.actor_rollout_ref.ref
    yield from _offload_problems("actor_rollout_ref.ref.fsdp_config", reference.fsdp_config, actor)
    if {trained.updates.strategy for trained in config.trained} == {"megatron"}:
        yield from megatron_checks.unlike_problems(actor.updates.megatron, config.trained[-1].updates.megatron)


def _torch_problems(trained: TrainedModel, ranks: int) -> Iterator[Problem]:
    if ranks != 1:
        yield Problem(
            f"{trained.key}.strategy",
            "torch",
            f"it is one process, and trainer.nnodes * trainer.n_gpus_per_node = {ranks}",
            f"{trained.key}.strategy=deepspeed, or trainer.nnodes=1 trainer.n_gpus_per_node=1",
        )


def _zero_problems(trained: TrainedModel) -> Iterator[Problem]:
    offload, stage = trained.updates.fsdp_config, trained.updates.deepspeed.zero_stage
    if offload.param_offload and stage != 3:
        yield Problem(
            f"{trained.key}.fsdp_config.param_offload",
            True,
            f"only ZeRO-3 keeps parameters in host memory, and {trained.key}.deepspeed.zero_stage = {stage}",
            f"{trained.key}.deepspeed.zero_stage=3, or {trained.key}.fsdp_config.param_offload=false",
        )
    elif offload.optimizer_offload and stage == 0:
        yield Problem(
            f"{trained.key}.fsdp_config.optimizer_offload",
            True,
            "ZeRO-0 keeps the whole optimizer on every rank's device",
            f"{trained.key}.deepspeed.zero_stage=2",
        )


def _offload_problems(where: str, offload: OffloadConfig, trained: TrainedModel) -> Iterator[Problem]:
    """What ``where``, which follows the backend of ``trained``, asks of it. A step on the host is Megatron's too."""
    strategy = trained.updates.strategy
    moved = {"deepspeed": ("param_offload", "optimizer_offload"), "megatron": ("optimizer_offload",)}.get(strategy, ())
    shared = ", which shares the model among GPUs instead" if strategy == "megatron" else ""
    for name in ("param_offload", "optimizer_offload"):
        if getattr(offload, name) and name not in moved:
            yield Problem(
                f"{where}.{name}",
                True,
                f"no effect with {trained.key}.strategy={strategy}{shared}",
                f"{where}.{name}=false, or {trained.key}.strategy=deepspeed",
            )
