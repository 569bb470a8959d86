"""Rules of the Megatron backend: layouts that cannot be, and knobs that mean nothing with it or without it."""

from collections.abc import Iterator
from importlib.util import find_spec
from math import gcd
from typing import Any

from rlhf_mp.config.schema import MegatronConfig, TrainedModel, TrainerConfig
from rlhf_mp.errors import Problem

ARCHITECTURES = ("llama", "qwen2", "qwen3")


def written_problems(trained: TrainedModel) -> Iterator[Problem]:
    """Knobs without effect, before those that follow from others are filled in."""
    megatron, key = trained.updates.megatron, f"{trained.key}.megatron"
    if megatron.recompute != MegatronConfig().recompute and trained.model.enable_gradient_checkpointing is False:
        yield Problem(
            f"{key}.recompute",
            megatron.recompute,
            f"no effect with {trained.model_key}.enable_gradient_checkpointing=false",
            f"{trained.model_key}.enable_gradient_checkpointing=true",
        )
    if megatron.sequence_parallel and megatron.tensor_model_parallel_size == 1:
        yield Problem(
            f"{key}.sequence_parallel",
            True,
            f"no effect with {key}.tensor_model_parallel_size=1",
            f"{key}.sequence_parallel=null",
        )


def megatron_problems(trained: TrainedModel, trainer: TrainerConfig) -> Iterator[Problem]:
    """What Megatron cannot do, whatever the model."""
    megatron, key = trained.updates.megatron, f"{trained.key}.megatron"
    yield from _layout_problems(key, megatron, trainer)
    if trained.model.enable_activation_offload:
        yield Problem(
            f"{trained.model_key}.enable_activation_offload",
            True,
            f"no effect with {trained.key}.strategy=megatron",
            f"{trained.model_key}.enable_gradient_checkpointing=true in its place, or {trained.key}.strategy=deepspeed",
        )
    if trained.model.use_remove_padding and megatron.context_parallel_size > 1:
        yield Problem(
            f"{trained.model_key}.use_remove_padding",
            True,
            f"ranks cannot share packed sequences ({key}.context_parallel_size={megatron.context_parallel_size})",
            f"{trained.model_key}.use_remove_padding=false, or {key}.context_parallel_size=1",
        )
    if trained.updates.fsdp_config.optimizer_offload and not megatron.use_distributed_optimizer:
        yield Problem(
            f"{trained.key}.fsdp_config.optimizer_offload",
            True,
            f"only Megatron's distributed optimizer steps on the host ({key}.use_distributed_optimizer=false)",
            f"{key}.use_distributed_optimizer=true, or {trained.key}.fsdp_config.optimizer_offload=false",
        )
    if missing := [name for name in ("megatron", "mbridge") if find_spec(name) is None]:
        fix = f"pip install megatron-core mbridge, or {trained.key}.strategy=deepspeed"
        yield Problem(f"{trained.key}.strategy", "megatron", f"not installed: {', '.join(missing)}", fix)
    if megatron.transformer_impl == "te" and find_spec("transformer_engine") is None:
        yield Problem(
            f"{key}.transformer_impl",
            "te",
            "Transformer Engine is not installed",
            f"pip install transformer-engine[pytorch], or {key}.transformer_impl=auto",
        )


def _layout_problems(key: str, megatron: MegatronConfig, trainer: TrainerConfig) -> Iterator[Problem]:
    copies, ranks = megatron.model_parallel_size, trainer.num_ranks
    if ranks % copies:
        yield Problem(
            key,
            _sizes(megatron),
            f"a copy of the model takes {copies} ranks, and trainer.nnodes * trainer.n_gpus_per_node = {ranks} "
            "is no multiple of it",
            f"trainer.n_gpus_per_node={copies} trainer.nnodes=1, or smaller sizes",
        )
    tp, per_node = megatron.tensor_model_parallel_size, trainer.n_gpus_per_node
    if trainer.nnodes > 1 and per_node % tp:
        yield Problem(
            f"{key}.tensor_model_parallel_size",
            tp,
            f"does not divide trainer.n_gpus_per_node = {per_node}, so matrices would be shared across machines",
            f"{key}.tensor_model_parallel_size={gcd(per_node, tp)}, and more pipeline stages",
        )
    if megatron.virtual_pipeline_model_parallel_size is not None and megatron.pipeline_model_parallel_size == 1:
        yield Problem(
            f"{key}.virtual_pipeline_model_parallel_size",
            megatron.virtual_pipeline_model_parallel_size,
            f"there is nothing to interleave with {key}.pipeline_model_parallel_size=1",
            f"{key}.virtual_pipeline_model_parallel_size=null",
        )


def unlike_problems(actor: MegatronConfig, critic: MegatronConfig) -> Iterator[Problem]:
    """Process groups are formed once, so all Megatron models of a job are spread over the ranks alike."""
    for name in LAYOUT:
        if getattr(critic, name) != getattr(actor, name):
            yield Problem(
                f"critic.megatron.{name}",
                getattr(critic, name),
                f"actor_rollout_ref.actor.megatron.{name} = {getattr(actor, name)}, "
                "and Megatron spreads all models of a job alike",
                f"critic.megatron.{name}={getattr(actor, name)}, or leave out the section",
            )


LAYOUT = tuple(
    f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context")
)


def _sizes(megatron: MegatronConfig) -> str:
    return (
        f"tensor {megatron.tensor_model_parallel_size} x pipeline {megatron.pipeline_model_parallel_size} "
        f"x context {megatron.context_parallel_size}"
    )


def shape_problems(trained: TrainedModel, path: str, model: dict[str, Any]) -> Iterator[Problem]:
    """What keeps one model from one layout.

    Args:
        model: the checkpoint's config.json, at ``path``.
    """
    megatron, key = trained.updates.megatron, f"{trained.key}.megatron"
    kind = model.get("model_type")
    if kind not in ARCHITECTURES:
        known, other = ", ".join(ARCHITECTURES), f"{trained.key}.strategy=deepspeed, or another model"
        yield Problem(f"{trained.model_key}.path", path, f"Megatron trains {known}; this is of type {kind}", other)
        return
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    heads = model["num_attention_heads"]
    for name, count in (("attention heads", heads), ("key-value heads", model.get("num_key_value_heads", heads))):
        if count % tp:
            yield Problem(
                f"{key}.tensor_model_parallel_size",
                tp,
                f"does not divide the model's {count} {name}",
                f"{key}.tensor_model_parallel_size={gcd(count, tp)}",
            )
    stages = pp * (megatron.virtual_pipeline_model_parallel_size or 1)
    layers = model["num_hidden_layers"]
    if layers % stages:
        yield Problem(
            f"{key}.pipeline_model_parallel_size",
            pp,
            f"the model's {layers} layers do not spread evenly over {stages} stages",
            f"{key}.pipeline_model_parallel_size={gcd(layers, pp)} {key}.virtual_pipeline_model_parallel_size=null",
        )
