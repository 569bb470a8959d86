"""Engines from the config: the place that knows which backend is which."""

from collections.abc import Callable

import torch
from torch import nn

from rlhf_mp.config.schema import RunConfig
from rlhf_mp.models.hf import DTYPES, load_causal_lm
from rlhf_mp.train.accumulate import ForwardSettings
from rlhf_mp.train.base import Scorer, TrainEngine


def forward_settings(config: RunConfig, device: torch.device) -> ForwardSettings:
    policy = config.actor_rollout_ref
    mixed = policy.actor.strategy == "torch" and policy.model.dtype != "float32"
    return ForwardSettings(
        device=device,
        temperature=policy.rollout.temperature,
        entropy_grad=policy.actor.entropy_coeff > 0,
        offload_activations=policy.model.enable_activation_offload,
        autocast=DTYPES[policy.model.dtype] if mixed else None,
    )


def model_builder(config: RunConfig, *, trained: bool) -> Callable[[], nn.Module]:
    model = config.actor_rollout_ref.model
    # The torch backend keeps float32 weights and computes in less; DeepSpeed keeps its own float32 copy.
    weights = "float32" if config.actor_rollout_ref.actor.strategy == "torch" else model.dtype

    def build() -> nn.Module:
        module = load_causal_lm(model.path, DTYPES[weights], trust_remote_code=model.trust_remote_code)
        if trained and model.enable_gradient_checkpointing:
            module.gradient_checkpointing_enable({"use_reentrant": False})
        return module

    return build


def make_actor(config: RunConfig, device: torch.device, num_updates: int) -> TrainEngine:
    policy = config.actor_rollout_ref
    settings, build = forward_settings(config, device), model_builder(config, trained=True)
    if policy.actor.strategy == "megatron":
        from rlhf_mp.train.megatron_engine import MegatronEngine

        return MegatronEngine(policy.model, settings, policy.actor, num_updates)
    if policy.actor.strategy == "torch":
        from rlhf_mp.train.torch_engine import TorchEngine

        return TorchEngine(build(), settings, policy.actor, num_updates)
    from rlhf_mp.train.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(build, settings, policy.actor, num_updates, policy.model.dtype)


def make_reference(config: RunConfig, device: torch.device) -> Scorer:
    policy = config.actor_rollout_ref
    settings, build = forward_settings(config, device), model_builder(config, trained=False)
    if policy.actor.strategy == "megatron":
        from rlhf_mp.train.megatron_engine import MegatronScorer

        return MegatronScorer(policy.model, settings, policy.actor.megatron)
    if policy.actor.strategy == "torch":
        from rlhf_mp.train.torch_engine import TorchScorer

        return TorchScorer(build(), settings)
    from rlhf_mp.train.deepspeed_engine import DeepSpeedScorer

    return DeepSpeedScorer(build, settings, policy.actor, policy.ref.fsdp_config, policy.model.dtype)


def join_ranks(config: RunConfig, device: torch.device) -> None:
    """Form the process group of the trainers."""
    strategy = config.actor_rollout_ref.actor.strategy
    if strategy == "deepspeed":
        from rlhf_mp.train.deepspeed_engine import init_distributed

        init_distributed()
    elif strategy == "megatron":
        if device.type == "cpu":
            from rlhf_mp.train.megatron_cpu import install

            install()
        from rlhf_mp.train.megatron_engine import init_distributed

        init_distributed(device)
