"""Engines from the config: the place that knows which backend is which."""

from collections.abc import Callable

import torch
from torch import nn

from rlhf_mp.config.schema import ModelConfig, OffloadConfig, RunConfig, TrainedConfig
from rlhf_mp.models.heads import Head, PolicyHead, RewardHead, ValueHead
from rlhf_mp.models.hf import DTYPES
from rlhf_mp.train.accumulate import ForwardSettings
from rlhf_mp.train.activation_offload import decoder_layers
from rlhf_mp.train.base import ParallelLayout, Scorer, TrainEngine
from rlhf_mp.train.checkpointing import checkpoint_layers


def forward_settings(model: ModelConfig, trained: TrainedConfig, head: Head, device: torch.device) -> ForwardSettings:
    mixed = trained.strategy == "torch" and model.dtype != "float32"
    return ForwardSettings(
        device=device,
        head=head,
        offload_layers=model.activation_offload_layers if model.enable_activation_offload else None,
        autocast=DTYPES[model.dtype] if mixed else None,
    )


def model_builder(
    model: ModelConfig, strategy: str, head: Head, *, checkpointing: bool = False
) -> Callable[[], nn.Module]:
    # The torch backend keeps float32 of what it trains and computes in less; DeepSpeed keeps its own float32 copy.
    trained = DTYPES["float32" if strategy == "torch" else model.dtype]
    weights = DTYPES[model.dtype] if model.lora_rank else trained

    def build() -> nn.Module:
        module = head.load(
            model.path,
            weights,
            attention=model.attn_implementation,
            quantization=model.quantization,
            trust_remote_code=model.trust_remote_code,
        )
        if checkpointing:
            checkpoint_layers(module, every=model.checkpoint_every_n_layers, recompute=model.recompute)
        if model.lora_rank:
            from rlhf_mp.models.lora import add_adapter

            add_adapter(module, decoder_layers(module), model, head, trained)
        return module

    return build


def make_engine(
    model: ModelConfig,
    trained: TrainedConfig,
    head: Head,
    device: torch.device,
    num_updates: int,
    layout: ParallelLayout | None = None,
) -> TrainEngine:
    """A model to be trained, on the backend ``trained.strategy``.

    Args:
        layout: who gets the same data, where another model's backend decides it.
    """
    settings = forward_settings(model, trained, head, device)
    build = model_builder(model, trained.strategy, head, checkpointing=model.enable_gradient_checkpointing)
    if trained.strategy == "megatron":
        from rlhf_mp.train.megatron_engine import MegatronEngine

        return MegatronEngine(model, settings, trained, num_updates)
    if trained.strategy == "torch":
        from rlhf_mp.train.torch_engine import TorchEngine

        return TorchEngine(build(), settings, trained, num_updates)
    from rlhf_mp.train.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(build, settings, trained, num_updates, model.dtype, layout)


def make_scorer(
    model: ModelConfig, like: TrainedConfig, offload: OffloadConfig, head: Head, device: torch.device
) -> Scorer:
    """A frozen model, on the backend and in the layout of the trained one ``like``.

    Args:
        offload: where DeepSpeed keeps its weights.
    """
    settings, build = forward_settings(model, like, head, device), model_builder(model, like.strategy, head)
    if like.strategy == "megatron":
        from rlhf_mp.train.megatron_engine import MegatronScorer

        return MegatronScorer(model, settings, like.megatron)
    if like.strategy == "torch":
        from rlhf_mp.train.torch_engine import TorchScorer

        return TorchScorer(build(), settings)
    from rlhf_mp.train.deepspeed_engine import DeepSpeedScorer

    return DeepSpeedScorer(build, settings, like, offload, model.dtype)


def policy_head(config: RunConfig) -> PolicyHead:
    policy = config.actor_rollout_ref
    return PolicyHead(
        policy.rollout.temperature,
        entropy_grad=policy.actor.entropy_coeff > 0,
        logits_chunk_bytes=policy.model.logits_chunk_mb * 10**6,
        packed=policy.model.use_remove_padding,
    )


def trained_head(config: RunConfig) -> Head:
    """What the model that ``trainer.task`` trains ends in."""
    if config.trainer.task == "reward_model":
        return RewardHead(packed=config.actor_rollout_ref.model.use_remove_padding)
    return policy_head(config)


def make_actor(config: RunConfig, device: torch.device, num_updates: int) -> TrainEngine:
    """The model that is trained: in trainer.task=reward_model it is the reward model."""
    policy = config.actor_rollout_ref
    return make_engine(policy.model, policy.actor, trained_head(config), device, num_updates, common_layout(config))


def make_critic(config: RunConfig, device: torch.device, num_updates: int) -> TrainEngine:
    critic = config.critic
    head = ValueHead(packed=critic.model.use_remove_padding)
    return make_engine(critic.model, critic, head, device, num_updates, common_layout(config))


def make_reward_scorer(config: RunConfig, device: torch.device) -> Scorer:
    """The frozen reward model, spread over the ranks as the actor is."""
    own, actor = config.reward_model, config.actor_rollout_ref.actor
    model = ModelConfig(
        own.model.path,
        own.model.dtype,
        attn_implementation=own.model.attn_implementation,
        trust_remote_code=own.model.trust_remote_code,
        quantization=own.model.quantization,
    )
    head = RewardHead(packed=own.model.use_remove_padding)
    return make_scorer(model, actor, OffloadConfig(param_offload=own.fsdp_config.param_offload), head, device)


def common_layout(config: RunConfig) -> ParallelLayout | None:
    """Megatron's, for the models of other backends beside it: its ranks that share a model get the same data."""
    for trained in config.trained:
        if trained.updates.strategy == "megatron":
            from rlhf_mp.train.megatron_engine import join_model_parallel

            return join_model_parallel(trained.updates.megatron)
    return None


def make_reference(config: RunConfig, device: torch.device, actor: TrainEngine) -> Scorer:
    """The model that training starts from; under an adapter it is still there."""
    policy = config.actor_rollout_ref
    if policy.model.lora_rank:
        from rlhf_mp.train.adapted import BaseScorer

        return BaseScorer(actor)
    return make_scorer(policy.model, policy.actor, policy.ref.fsdp_config, policy_head(config), device)


def join_ranks(config: RunConfig, device: torch.device) -> None:
    """Form the process group of the trainers."""
    strategies = {trained.updates.strategy for trained in config.trained}
    if "megatron" in strategies:
        if device.type == "cpu":
            from rlhf_mp.train.megatron_cpu import install

            install()
        from rlhf_mp.train.megatron_engine import init_distributed

        init_distributed(device)
    if "deepspeed" in strategies:
        from rlhf_mp.train.deepspeed_engine import init_distributed

        init_distributed()  # joins a process group that is there already
