"""Knobs that follow from others. After loading none of these is unset."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from rlhf_mp.config.algorithm import needs_of
from rlhf_mp.config.schema import ActorConfig, MegatronConfig, RolloutConfig, RunConfig, TrainedConfig


def derive(config: RunConfig) -> None:
    """Fill in, in place, every knob documented as "unset: ..." whose value other knobs decide."""
    policy, trainer, data = config.actor_rollout_ref, config.trainer, config.data
    if data.max_length is None:
        data.max_length = data.max_prompt_length + data.max_response_length
    _derive_actor(policy.actor)
    _derive_critic(config)
    _derive_rollout(policy.rollout, config)
    correction, sync = config.algorithm.rollout_correction, policy.weight_sync
    if correction.method is None:
        correction.method = default_correction(config)
    if sync.transport is None:
        one_machine = trainer.nnodes == 1 and not policy.rollout.nnodes
        shared = one_machine and (trainer.placement == "colocated" or trainer.device == "cpu")
        sync.transport = "tensor" if shared else "distributed"
    if sync.canary_tolerance is None:
        exact = policy.model.dtype == policy.rollout.dtype == "float32"
        sync.canary_tolerance = 1e-4 if exact else 0.05
    if trainer.default_local_dir is None:
        trainer.default_local_dir = str(Path("runs") / trainer.project_name / trainer.experiment_name)
    if config.data.cache_dir is None:
        config.data.cache_dir = str(Path(trainer.default_local_dir) / "prompts")


def default_correction(config: RunConfig) -> Literal["none", "tis"]:
    """Samples of older weights are weighed; those of the live weights differ from the trainer's by rounding alone."""
    return "tis" if config.actor_rollout_ref.rollout.max_staleness > 0 else "none"


def _derive_actor(actor: ActorConfig) -> None:
    if actor.clip_ratio_low is None:
        actor.clip_ratio_low = actor.clip_ratio
    if actor.clip_ratio_high is None:
        actor.clip_ratio_high = actor.clip_ratio
    if actor.log_prob_max_token_len_per_gpu is None:
        actor.log_prob_max_token_len_per_gpu = actor.ppo_max_token_len_per_gpu
    if actor.log_prob_micro_batch_size_per_gpu is None:
        actor.log_prob_micro_batch_size_per_gpu = actor.ppo_micro_batch_size_per_gpu
    _derive_trained(actor)


def _derive_trained(trained: TrainedConfig) -> None:
    if trained.deepspeed.zero_stage is None:
        trained.deepspeed.zero_stage = 3 if trained.fsdp_config.reshard_after_forward else 2
    trained.fsdp_config.reshard_after_forward = trained.deepspeed.zero_stage == 3
    if trained.megatron.sequence_parallel is None:
        trained.megatron.sequence_parallel = trained.megatron.tensor_model_parallel_size > 1


def needs_critic(config: RunConfig) -> bool:
    """Does the advantage estimator ask for values?"""
    return needs_of(config.algorithm.adv_estimator).critic


def has_critic(config: RunConfig) -> bool:
    return needs_critic(config) if config.critic.enable is None else config.critic.enable


def _derive_critic(config: RunConfig) -> None:
    policy, critic = config.actor_rollout_ref, config.critic
    critic.enable = has_critic(config)
    for own, others, names in (
        (critic, policy.actor, ("strategy", "ppo_epochs", "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu")),
        (critic.model, policy.model, ("path", "dtype", "enable_gradient_checkpointing", "use_remove_padding")),
    ):
        for name in names:
            if getattr(own, name) is None:
                setattr(own, name, getattr(others, name))
    if critic.model.attn_implementation is None:  # Megatron has attention of its own
        own = policy.model.attn_implementation
        critic.model.attn_implementation = "auto" if critic.strategy == "megatron" else own
    if critic.forward_max_token_len_per_gpu is None:
        critic.forward_max_token_len_per_gpu = critic.ppo_max_token_len_per_gpu
    if critic.forward_micro_batch_size_per_gpu is None:
        critic.forward_micro_batch_size_per_gpu = critic.ppo_micro_batch_size_per_gpu
    if critic.strategy == "megatron" and critic.megatron == MegatronConfig():
        critic.megatron = replace(policy.actor.megatron)  # all Megatron models of a job are spread alike
    _derive_trained(critic)


def _derive_rollout(rollout: RolloutConfig, config: RunConfig) -> None:
    if rollout.dtype is None:
        rollout.dtype = config.actor_rollout_ref.model.dtype
    if rollout.max_model_len is None:
        rollout.max_model_len = config.data.max_length
    if rollout.num_engines is None:
        # not a divisor: checks.py says so
        gpus = (rollout.nnodes or config.trainer.nnodes) * config.trainer.n_gpus_per_node
        rollout.num_engines = max(1, gpus // rollout.tensor_model_parallel_size)
