"""Rules of LoRA: knobs without effect, backends without adapters, and layers that the model does not have."""

import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from rlhf_mp.config.derive import has_critic
from rlhf_mp.config.model_folder import stored_shapes
from rlhf_mp.config.schema import ModelConfig, RunConfig, TrainedModel
from rlhf_mp.errors import Problem

ALL_LINEAR = "all-linear"
PEFT_PREFIX = "base_model.model."  # of every name in a file that peft writes
ADAPTER_ONLY = "actor_rollout_ref.weight_sync.adapter_only"
NO_QUANTIZATION = "actor_rollout_ref.model.quantization=null"
FUSED = (({"q_proj", "k_proj", "v_proj"}, {"q_proj", "v_proj"}), ({"gate_proj", "up_proj"}, {"gate_proj"}))
"""What SGLang computes as one matrix, and which of it an adapter must have for the others to count."""
IN_A_LAYER = re.compile(r"\.\d+\.(?:.*\.)?(\w+)\.weight")
"""Weights of the decoder's layers, by the last name of their module."""


def written_problems(config: RunConfig) -> Iterator[Problem]:
    """Knobs of adapters that nobody trains."""
    complete = replace(config, critic=replace(config.critic, enable=has_critic(config)))
    for trained in complete.trained:
        if trained.model.lora_rank:
            continue
        for name in ("lora_alpha", "lora_dropout", "quantization", "target_modules"):
            value = getattr(trained.model, name)
            if value != getattr(ModelConfig(), name):
                rank = f"{trained.model_key}.lora_rank"
                yield Problem(f"{trained.model_key}.{name}", value, f"no effect with {rank}=0", f"{rank}=16")


def lora_problems(config: RunConfig) -> Iterator[Problem]:
    """What adapters need, once knobs that follow from others are filled in."""
    for trained in config.trained:
        if trained.model.lora_rank:
            yield from _adapter_problems(trained, config.trainer.task)
    if config.trainer.task == "rl" and config.actor_rollout_ref.weight_sync.adapter_only:
        yield from _served_problems(config)
    reference = config.actor_rollout_ref.ref.fsdp_config
    if config.actor_rollout_ref.model.lora_rank and reference.param_offload:
        yield Problem(
            "actor_rollout_ref.ref.fsdp_config.param_offload",
            True,
            "with LoRA the reference model is the actor's own base, without a copy that could be elsewhere",
            "actor_rollout_ref.ref.fsdp_config.param_offload=false (actor_rollout_ref.actor.fsdp_config moves both)",
        )


def _adapter_problems(trained: TrainedModel, task: str) -> Iterator[Problem]:
    model, key = trained.model, trained.model_key
    if trained.updates.strategy == "megatron":
        yield Problem(
            f"{key}.lora_rank",
            model.lora_rank,
            f"{trained.key}.strategy=megatron trains whole models only",
            f"{trained.key}.strategy=deepspeed, or {key}.lora_rank=0",
        )
    if model.lora_dropout and task == "rl":
        reason = "log-probs with dropout are of another model than the one that sampled"
        yield Problem(f"{key}.lora_dropout", model.lora_dropout, reason, f"{key}.lora_dropout=0")
    if model.quantization is not None and find_spec("bitsandbytes") is None:
        fix = f"pip install bitsandbytes, or {key}.quantization=null"
        yield Problem(f"{key}.quantization", model.quantization, "the package bitsandbytes is not installed", fix)
    if not model.target_modules or (ALL_LINEAR in model.target_modules and len(model.target_modules) > 1):
        reason = f"must be names of layers, or {ALL_LINEAR} alone"
        yield Problem(f"{key}.target_modules", model.target_modules, reason, f"{key}.target_modules={ALL_LINEAR}")


def _served_problems(config: RunConfig) -> Iterator[Problem]:
    """What keeps engines from serving an adapter beside the checkpoint they started from."""
    model = config.actor_rollout_ref.model
    off = f"{ADAPTER_ONLY}=false"
    if not model.lora_rank:
        reason = "there is no adapter: actor_rollout_ref.model.lora_rank = 0"
        yield Problem(ADAPTER_ONLY, True, reason, f"actor_rollout_ref.model.lora_rank=16, or {off}")
    if model.quantization:
        reason = f"engines have the checkpoint as it is, the trainer what {model.quantization} has left of it"
        yield Problem(ADAPTER_ONLY, True, reason, f"{off} (the merged base is sent), or {NO_QUANTIZATION}")
    chosen = set(model.target_modules)
    missing = {name for some, needed in FUSED if chosen & some for name in needed - chosen}
    if missing:
        yield Problem(
            "actor_rollout_ref.model.target_modules",
            model.target_modules,
            "engines compute q_proj, k_proj and v_proj as one matrix, gate_proj and up_proj as another: "
            f"{ADAPTER_ONLY} needs {' and '.join(sorted(missing))}, too",
            f"actor_rollout_ref.model.target_modules=[{','.join(sorted(chosen | missing))}], or {off}",
        )


def target_problems(config: RunConfig) -> Iterator[Problem]:
    """Adapters of layers that the checkpoint does not have, or does not tell of."""
    actor = config.actor_rollout_ref
    if config.trainer.task == "rl" and actor.weight_sync.adapter_only and not linear_names(Path(actor.model.path)):
        reason = f"what adapters consist of is read from safetensors, and {actor.model.path} has none of a decoder"
        yield Problem(ADAPTER_ONLY, True, reason, f"save the model as safetensors, or {ADAPTER_ONLY}=false")
    for trained in config.trained:
        targets = trained.model.target_modules
        if not trained.model.lora_rank or not targets or ALL_LINEAR in targets:
            continue
        names = linear_names(Path(trained.model.path))
        unknown = [name for name in targets if name not in names]
        if names and unknown:
            yield Problem(
                f"{trained.model_key}.target_modules",
                targets,
                f"no layer of the model has a linear part named {', '.join(unknown)}; it has {', '.join(names)}",
                f"{trained.model_key}.target_modules=[{','.join(name for name in names if name not in unknown)}]",
            )


def linear_names(folder: Path) -> list[str]:
    """Last names of the matrices in a checkpoint's layers; empty where its files don't tell."""
    matrices = [name for name, shape in stored_shapes(folder).items() if len(shape) == 2]
    return sorted({found[1] for name in matrices if (found := IN_A_LAYER.search(name))})
