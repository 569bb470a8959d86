"""What a run will do, in words and numbers, from its config and the model's folder."""

from pathlib import Path

from rlhf_mp.config.load import config_to_yaml
from rlhf_mp.config.model_folder import count_parameters
from rlhf_mp.config.reward import terms_of
from rlhf_mp.config.schema import ActorConfig, DataConfig, ModelConfig, RunConfig, TrainedConfig


def describe_run(config: RunConfig) -> str:
    """Text for ``--check``: who runs, how a step is cut, which files, and the resolved config as YAML."""
    step = _step if config.trainer.task == "rl" else _step_without_rl
    lines = [f"{name:<10} {value}" for name, value in {**_who(config), **step(config), **_files(config)}.items()]
    return "\n".join([*lines, "", "# resolved configuration", config_to_yaml(config)])


def _who(config: RunConfig) -> dict[str, str]:
    policy, trainer, rollout = config.actor_rollout_ref, config.trainer, config.actor_rollout_ref.rollout
    sync = policy.weight_sync
    ranks = f"{trainer.num_ranks} ({trainer.nnodes} x {trainer.n_gpus_per_node})"
    training = {
        "ranks": f"{ranks}, {_backend(policy.actor, config)}",
        "model": f"{policy.model.path}, {_size(policy.model.path)}, {policy.model.dtype}{_adapter(policy.model)}",
    }
    if trainer.task != "rl":
        return training | {"reference": "yes" if trainer.task == "dpo" else "none needed"}
    span = config.machines_per_engine
    spread = f"each over {span} machines, " if span > 1 else ""
    scored = {"reward": _reward_model(config)} if config.reward_model.enable else {}
    return training | {
        "engines": f"{rollout.num_engines} SGLang, tensor parallel {rollout.tensor_model_parallel_size}, "
        f"{spread}{rollout.dtype}, {_beside(config)}",
        "weights": f"{'of the adapter, ' if sync.adapter_only else ''}swapped by {sync.transport}, every swap verified",
        "reference": "yes, for the KL term" if config.needs_reference else "none needed",
        "critic": _critic(config),
        **scored,
    }


def _reward_model(config: RunConfig) -> str:
    own, knobs = config.reward_model, config.reward_model.rollout
    model = f"reward model {own.model.path}, {own.model.dtype}"
    if not own.served:
        return f"{model}{f', {own.model.quantization}' if own.model.quantization else ''}, on the ranks"
    servers = f"{knobs.num_engines} SGLang server(s), tensor parallel {knobs.tensor_model_parallel_size}"
    place = "beside the engines" if config.trainer.placement == "colocated" else "on a place of their own"
    return f"{model}, {servers}, {place}"


def _beside(config: RunConfig) -> str:
    if config.trainer.placement == "colocated":
        return "by turns with the ranks"
    what = "cores" if config.trainer.device == "cpu" else "GPUs"
    if config.engine_machines:
        what = f"{config.engine_machines} machine(s)"
    return f"on {what} of their own, at most {config.actor_rollout_ref.rollout.max_staleness} version(s) behind"


def _critic(config: RunConfig) -> str:
    critic = config.critic
    if not critic.enable:
        return "none needed"
    model = f"{critic.model.path}, {critic.model.dtype}, {_backend(critic, config)}, lr {critic.optim.lr:g}"
    return f"{model}, alone in the first {config.trainer.critic_warmup} steps"


def _adapter(model: ModelConfig) -> str:
    base = f", {model.quantization} base" if model.quantization else ""
    return f", LoRA rank {model.lora_rank}{base}" if model.lora_rank else ""


def _backend(trained: TrainedConfig, config: RunConfig) -> str:
    if trained.strategy == "torch":
        return "plain torch"
    if trained.strategy == "megatron":
        sizes = trained.megatron
        return (
            f"Megatron, tensor parallel {sizes.tensor_model_parallel_size}, "
            f"pipeline parallel {sizes.pipeline_model_parallel_size}, data parallel {config.data_parallel_size}"
        )
    offloads = [name for name in ("param_offload", "optimizer_offload") if getattr(trained.fsdp_config, name)]
    return f"DeepSpeed ZeRO-{trained.deepspeed.zero_stage}" + "".join(f", {name}" for name in offloads)


def _size(path: str) -> str:
    count = count_parameters(Path(path))
    if count is None:
        return "size unknown (no safetensors)"
    for unit, scale in (("B", 1e9), ("M", 1e6)):
        if count >= scale:
            return f"{count / scale:.2f}{unit} parameters"
    return f"{count} parameters"


def _step(config: RunConfig) -> dict[str, str]:
    data, policy, ranks = config.data, config.actor_rollout_ref, config.data_parallel_size
    actor, prompts, n = policy.actor, config.data.train_batch_size, policy.rollout.n
    minis = prompts // actor.ppo_mini_batch_size
    optimizer_steps = minis * actor.ppo_epochs
    longest = data.max_prompt_length + data.max_response_length
    return {
        "sampling": f"{prompts} prompts x {n} = {prompts * n} responses a step, each {data.max_prompt_length} + "
        f"{data.max_response_length} = {longest} tokens at most",
        "training": f"{minis} mini-batches of {actor.ppo_mini_batch_size} prompts x {actor.ppo_epochs} epoch(s) = "
        f"{optimizer_steps} optimizer steps, about {prompts * n / ranks:g} responses a rank and step",
        "cut": _cut(actor),
        "algorithm": f"{config.algorithm.adv_estimator}, {actor.policy_loss}, clip {actor.clip_ratio_low}/"
        f"{actor.clip_ratio_high}, lr {actor.optim.lr:g}, reward {reward_text(config)}",
    }


def reward_text(config: RunConfig) -> str:
    """The weighted sum: "0.8 math + 0.2 format"."""
    terms = terms_of(config.reward)
    return terms[0].label if len(terms) == 1 else " + ".join(f"{term.weight:g} {term.label}" for term in terms)


def _entries(data: DataConfig) -> list[str]:
    """The training files, with their shares of the prompts where they have some."""
    if not data.train_weights:
        return data.train_files
    shares = (weight / sum(data.train_weights) for weight in data.train_weights)
    return [f"{file} ({share:.0%})" for file, share in zip(data.train_files, shares, strict=True)]


def _step_without_rl(config: RunConfig) -> dict[str, str]:
    data, actor = config.data, config.actor_rollout_ref.actor
    what = {"sft": "examples", "dpo": "pairs", "reward_model": "pairs"}[config.trainer.task]
    batch, ranks = data.train_batch_size, config.data_parallel_size
    return {
        "task": f"{config.trainer.task}, lr {actor.optim.lr:g}",
        "training": f"{batch} {what} a step, about {batch / ranks:g} a rank, {data.max_length} tokens at most",
        "cut": _cut(actor),
    }


def _cut(actor: ActorConfig) -> str:
    if actor.use_dynamic_bsz:
        return f"micro-batches of at most {actor.ppo_max_token_len_per_gpu} tokens"
    return f"micro-batches of at most {actor.ppo_micro_batch_size_per_gpu} sequences"


def _files(config: RunConfig) -> dict[str, str]:
    trainer, data = config.trainer, config.data
    length = f"{trainer.total_epochs} epoch(s)"
    if trainer.total_training_steps is not None:
        length = f"{trainer.total_training_steps} steps"
    return {
        "length": length,
        "data": ", ".join(_entries(data)),
        "validation": ", ".join(data.val_files) or "none",
        "output": trainer.default_local_dir,
    }
