"""Rules of the Megatron backend: layouts that cannot be, and knobs that mean nothing with it or without it."""

from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from math import gcd
from typing import Any

from rlhf_mp.config.schema import MegatronConfig, RunConfig
from rlhf_mp.errors import Problem

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
KEY = f"{ACTOR}.megatron"
ARCHITECTURES = ("llama", "qwen2", "qwen3")


def written_problems(config: RunConfig) -> Iterator[Problem]:
    """Knobs without effect, before those that follow from others are filled in."""
    actor, megatron = config.actor_rollout_ref.actor, config.actor_rollout_ref.actor.megatron
    if actor.strategy != "megatron":
        unchanged = (MegatronConfig(), MegatronConfig(sequence_parallel=False))  # False is what an unset one becomes
        if megatron not in unchanged:
            yield Problem(
                KEY,
                asdict(megatron),
                f"no effect with {ACTOR}.strategy={actor.strategy}",
                f"{ACTOR}.strategy=megatron, or remove the section",
            )
        return
    checkpointing = config.actor_rollout_ref.model.enable_gradient_checkpointing
    if megatron.recompute != MegatronConfig().recompute and not checkpointing:
        yield Problem(
            f"{KEY}.recompute",
            megatron.recompute,
            f"no effect with {MODEL}.enable_gradient_checkpointing=false",
            f"{MODEL}.enable_gradient_checkpointing=true",
        )
    if megatron.sequence_parallel and megatron.tensor_model_parallel_size == 1:
        yield Problem(
            f"{KEY}.sequence_parallel",
            True,
            f"no effect with {KEY}.tensor_model_parallel_size=1",
            f"{KEY}.sequence_parallel=null",
        )


def megatron_problems(config: RunConfig) -> Iterator[Problem]:
    """What Megatron cannot do, whatever the model."""
    megatron = config.actor_rollout_ref.actor.megatron
    yield from _layout_problems(config)
    yield from _offload_problems(config)
    if missing := [name for name in ("megatron", "mbridge") if find_spec(name) is None]:
        fix = f"pip install megatron-core mbridge, or {ACTOR}.strategy=deepspeed"
        yield Problem(f"{ACTOR}.strategy", "megatron", f"not installed: {', '.join(missing)}", fix)
    if megatron.transformer_impl == "te" and find_spec("transformer_engine") is None:
        yield Problem(
            f"{KEY}.transformer_impl",
            "te",
            "Transformer Engine is not installed",
            f"pip install transformer-engine[pytorch], or {KEY}.transformer_impl=auto",
        )


def _layout_problems(config: RunConfig) -> Iterator[Problem]:
    megatron, ranks = config.actor_rollout_ref.actor.megatron, config.trainer.num_ranks
    copies = megatron.model_parallel_size
    if ranks % copies:
        yield Problem(
            KEY,
            _sizes(megatron),
            f"a copy of the model takes {copies} ranks, and trainer.nnodes * trainer.n_gpus_per_node = {ranks} "
            "is no multiple of it",
            f"trainer.n_gpus_per_node={copies} trainer.nnodes=1, or smaller sizes",
        )
    tp, per_node = megatron.tensor_model_parallel_size, config.trainer.n_gpus_per_node
    if config.trainer.nnodes > 1 and per_node % tp:
        yield Problem(
            f"{KEY}.tensor_model_parallel_size",
            tp,
            f"does not divide trainer.n_gpus_per_node = {per_node}, so matrices would be shared across machines",
            f"{KEY}.tensor_model_parallel_size={gcd(per_node, tp)}, and more pipeline stages",
        )
    if megatron.virtual_pipeline_model_parallel_size is not None and megatron.pipeline_model_parallel_size == 1:
        yield Problem(
            f"{KEY}.virtual_pipeline_model_parallel_size",
            megatron.virtual_pipeline_model_parallel_size,
            f"there is nothing to interleave with {KEY}.pipeline_model_parallel_size=1",
            f"{KEY}.virtual_pipeline_model_parallel_size=null",
        )
    if megatron.packed and megatron.context_parallel_size > 1:
        yield Problem(
            f"{KEY}.packed",
            True,
            f"ranks cannot share packed sequences ({KEY}.context_parallel_size={megatron.context_parallel_size})",
            f"{KEY}.packed=false, or {KEY}.context_parallel_size=1",
        )


def _sizes(megatron: MegatronConfig) -> str:
    return (
        f"tensor {megatron.tensor_model_parallel_size} x pipeline {megatron.pipeline_model_parallel_size} "
        f"x context {megatron.context_parallel_size}"
    )


def _offload_problems(config: RunConfig) -> Iterator[Problem]:
    policy = config.actor_rollout_ref
    for where, offload in ((ACTOR, policy.actor.fsdp_config), ("actor_rollout_ref.ref", policy.ref.fsdp_config)):
        for name in ("param_offload", "optimizer_offload"):
            if getattr(offload, name):
                yield Problem(
                    f"{where}.fsdp_config.{name}",
                    True,
                    f"no effect with {ACTOR}.strategy=megatron, which shares the model among GPUs instead",
                    f"{where}.fsdp_config.{name}=false, or {ACTOR}.strategy=deepspeed",
                )
    if policy.model.enable_activation_offload:
        yield Problem(
            f"{MODEL}.enable_activation_offload",
            True,
            f"no effect with {ACTOR}.strategy=megatron",
            f"{MODEL}.enable_gradient_checkpointing=true in its place, or {ACTOR}.strategy=deepspeed",
        )


def shape_problems(config: RunConfig, path: str, model: dict[str, Any]) -> Iterator[Problem]:
    """What keeps one model from one layout.

    Args:
        model: the checkpoint's config.json, at ``path``.
    """
    megatron = config.actor_rollout_ref.actor.megatron
    kind = model.get("model_type")
    if kind not in ARCHITECTURES:
        known, other = ", ".join(ARCHITECTURES), f"{ACTOR}.strategy=deepspeed, or another model"
        yield Problem(f"{MODEL}.path", path, f"Megatron trains {known}; this is of type {kind}", other)
        return
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    heads = model["num_attention_heads"]
    for name, count in (("attention heads", heads), ("key-value heads", model.get("num_key_value_heads", heads))):
        if count % tp:
            yield Problem(
                f"{KEY}.tensor_model_parallel_size",
                tp,
                f"does not divide the model's {count} {name}",
                f"{KEY}.tensor_model_parallel_size={gcd(count, tp)}",
            )
    stages = pp * (megatron.virtual_pipeline_model_parallel_size or 1)
    layers = model["num_hidden_layers"]
    if layers % stages:
        yield Problem(
            f"{KEY}.pipeline_model_parallel_size",
            pp,
            f"the model's {layers} layers do not spread evenly over {stages} stages",
            f"{KEY}.pipeline_model_parallel_size={gcd(layers, pp)} {KEY}.virtual_pipeline_model_parallel_size=null",
        )
