"""Every knob, its default and its own range. Defaults live here and nowhere else.

Names are those people already write for this kind of trainer; a new name exists only where there was none.
Units are part of a name (``_s``, ``_mb``, ``_gib``) unless the established name has none.
A knob that is unset (``None``) because it follows from others is filled in when a config is loaded, see derive.py.
"""

from dataclasses import dataclass
from typing import Any, Literal

from rlhf_mp.config.algorithm import POLICY_LOSSES, SELECTING, AlgorithmConfig
from rlhf_mp.config.dpo import DpoConfig
from rlhf_mp.config.knob import knob, section
from rlhf_mp.config.multi_turn import MultiTurnConfig
from rlhf_mp.config.reward import RewardConfig
from rlhf_mp.config.weight_sync import WeightSyncConfig


@dataclass
class DataConfig:
    """Where prompts and examples come from and how they are batched."""

    train_files: list[str] = knob([], "file or list of files: .jsonl, .parquet, or a Hugging Face dataset folder")
    train_weights: list[float] = knob(
        [], "prompts from each entry of train_files, in proportion, e.g. [3,1]; empty: all rows alike", gt=0
    )
    val_files: list[str] = knob([], "held-out prompts, each file reported by itself too; empty: no validation")
    prompt_key: str = knob("prompt", "column with the prompt: a text, or a list of chat messages")
    answer_key: str = knob("answer", "column with the reference answer, handed to the reward")
    reward_fn_key: str = knob("", "column that says where a row is from, see reward.terms.*.sources; empty: none")
    system_prompt: str = knob("", "put before every text prompt as a system message")
    apply_chat_template: bool = knob(True, "wrap prompts in the tokenizer's chat template")
    train_batch_size: int = knob(1024, "prompts per step; examples or pairs per optimizer step without rl", ge=1)
    max_prompt_length: int = knob(512, "tokens; longer prompts are dropped and counted", ge=1)
    max_response_length: int = knob(512, "tokens sampled at most", ge=1)
    filter_overlong_prompts: bool = knob(True, "drop too long prompts; false: see truncation")
    truncation: Literal["error", "left", "right", "middle"] = knob(
        "error", "too long prompts, if not dropped, are refused, or lose their beginning, end or middle"
    )
    shuffle: bool = knob(True, "a new order each epoch, from data.seed")
    seed: int = knob(1, "order of prompts", ge=0)
    curriculum_key: str | None = knob(None, "column with a number: every epoch goes through the prompts by it")
    curriculum_order: Literal["ascending", "descending"] = knob("ascending", "small numbers first, or large ones")
    val_max_samples: int = knob(-1, "use only the first so many rows of each validation file; -1: all", ge=-1)
    cache_dir: str | None = knob(
        None, "tokenised prompts are kept here for the next start; unset: prompts/ in the run directory"
    )
    response_key: str = knob("response", "sft: column with the text that answers the prompt")
    messages_key: str | None = knob(None, "sft: column with whole conversations, in place of prompt and response")
    chosen_key: str = knob("chosen", "dpo, reward_model: column with the better response: a text, or messages")
    rejected_key: str = knob("rejected", "dpo, reward_model: column with the worse response")
    margin_key: str | None = knob(None, "reward_model: column that says by how much it is worse; unset: by anything")
    max_length: int | None = knob(
        None, "tokens of an example at most, without rl; unset: max_prompt_length + max_response_length", ge=2
    )


@dataclass
class OffloadConfig:
    """ZeRO settings under the names used for FSDP."""

    param_offload: bool = knob(False, "keep parameters in host memory, fetch a layer at a time (ZeRO-3)")
    optimizer_offload: bool = knob(False, "keep optimizer state in host memory and step there")
    reshard_after_forward: bool = knob(True, "true: ZeRO-3; false: ZeRO-2, whole parameters on every rank")
    forward_prefetch: bool = knob(True, "fetch the next layer's parameters while this one computes")


@dataclass
class ModelConfig:
    """The policy's checkpoint and how it is held."""

    path: str = knob("", "Hugging Face checkpoint folder")
    dtype: Literal["float32", "bfloat16"] = knob("bfloat16", "of weights and activations; the optimizer keeps float32")
    enable_gradient_checkpointing: bool = knob(True, "recompute activations in the backward pass")
    checkpoint_every_n_layers: int = knob(1, "recompute every so-many-th layer; 1: all (gradient checkpointing)", ge=1)
    enable_activation_offload: bool = knob(False, "keep saved activations in host memory")
    activation_offload_layers: int = knob(
        1, "layers whose activations move together while the next ones compute; 0: each tensor is waited for", ge=0
    )
    use_remove_padding: bool = knob(
        False, "micro-batches of sequences one after the other, instead of padded to the longest of them"
    )
    logits_chunk_mb: int = knob(
        512, "MB (10^6 bytes) of float32 logits that exist at once on a rank; 0: those of a whole micro-batch", ge=0
    )
    trust_remote_code: bool = knob(False, "run code that comes with the checkpoint")


@dataclass
class OptimConfig:
    """AdamW and its learning rate."""

    lr: float = knob(1e-6, "peak learning rate", gt=0)
    betas: list[float] = knob([0.9, 0.999], "AdamW's two decay rates, each below 1", ge=0)
    eps: float = knob(1e-8, "AdamW's epsilon", gt=0)
    weight_decay: float = knob(0.01, "decoupled weight decay", ge=0)
    lr_warmup_steps: int = knob(0, "optimizer steps of linear warm-up", ge=0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = knob("constant", "after warm-up")
    min_lr_ratio: float = knob(0.0, "where linear and cosine end, as a share of lr", ge=0, le=1)


@dataclass
class DeepSpeedConfig:
    """What only DeepSpeed has."""

    zero_stage: int | None = knob(None, "0-3; unset: 3, or 2 with fsdp_config.reshard_after_forward=false", ge=0, le=3)
    reduce_bucket_size: int = knob(50_000_000, "elements reduced at once", ge=1)
    prefetch_bucket_size: int = knob(50_000_000, "elements fetched ahead (ZeRO-3)", ge=0)
    param_persistence_threshold: int = knob(100_000, "smaller parameters stay whole on every rank (ZeRO-3)", ge=0)


@dataclass
class MegatronConfig:
    """What only Megatron has. The ranks that tensor, pipeline and context parallelism leave over are data-parallel."""

    tensor_model_parallel_size: int = knob(1, "ranks that share every matrix", ge=1)
    pipeline_model_parallel_size: int = knob(1, "ranks that share the layers", ge=1)
    virtual_pipeline_model_parallel_size: int | None = knob(
        None, "parts of the layers on each pipeline rank, interleaved for less idle time; unset: one", ge=2
    )
    context_parallel_size: int = knob(1, "ranks that share every sequence", ge=1)
    sequence_parallel: bool | None = knob(
        None, "share the work between matrices along the sequence too; unset: with tensor parallelism"
    )
    use_distributed_optimizer: bool = knob(True, "share optimizer state among data-parallel ranks")
    recompute: Literal["full", "selective"] = knob(
        "full", "what enable_gradient_checkpointing recomputes: whole layers, or attention alone"
    )
    transformer_impl: Literal["auto", "local", "te"] = knob(
        "auto", "layers: torch's (local) or Transformer Engine's (te); auto: te on a GPU where it is installed"
    )

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size


@dataclass
class TrainedConfig:
    """How one trained model is held and stepped, whatever it is trained for."""

    strategy: Literal["deepspeed", "megatron", "torch"] = knob(
        "deepspeed", "training backend; torch: one process, the reference implementation"
    )
    grad_clip: float = knob(1.0, "global gradient norm; 0: no clipping", ge=0)
    optim: OptimConfig = section(OptimConfig)
    fsdp_config: OffloadConfig = section(OffloadConfig)
    deepspeed: DeepSpeedConfig = section(DeepSpeedConfig)
    megatron: MegatronConfig = section(MegatronConfig)

    @property
    def model_parallel_size(self) -> int:
        """Ranks that get the same data, as parts of one model."""
        return self.megatron.model_parallel_size if self.strategy == "megatron" else 1


@dataclass
class ActorConfig(TrainedConfig):
    """The policy's updates."""

    ppo_mini_batch_size: int = knob(256, "prompts per optimizer step", ge=1)
    ppo_epochs: int = knob(1, "passes over each step's samples", ge=1)
    use_dynamic_bsz: bool = knob(True, "cut micro-batches by tokens instead of by sequences")
    ppo_max_token_len_per_gpu: int = knob(16384, "tokens and padding per training micro-batch (use_dynamic_bsz)", ge=1)
    ppo_micro_batch_size_per_gpu: int = knob(8, "sequences per training micro-batch (not use_dynamic_bsz)", ge=1)
    log_prob_max_token_len_per_gpu: int | None = knob(None, "the same for forward-only passes; unset: ppo_...", ge=1)
    log_prob_micro_batch_size_per_gpu: int | None = knob(None, "the same for forward-only passes; unset: ppo_...", ge=1)
    policy_loss: str = knob("ppo_clip", "registered policy loss, see docs/algorithms.md", names=POLICY_LOSSES)
    clip_ratio: float = knob(0.2, "PPO clip, as a distance from 1", gt=0)
    clip_ratio_low: float | None = knob(None, "lower clip; unset: clip_ratio", gt=0)
    clip_ratio_high: float | None = knob(None, "upper clip; unset: clip_ratio", gt=0)
    clip_ratio_c: float | None = knob(None, "dual clip: largest ratio of a negative advantage; unset: none", gt=1)
    tau_pos: float = knob(1.0, "sapo: how soon the gate closes for positive advantages", gt=0)
    tau_neg: float = knob(1.05, "sapo: the same for negative advantages", gt=0)
    kl_cov_ratio: float = knob(0.0002, "kl_cov: share of tokens held back, those of largest covariance", gt=0, le=1)
    ppo_kl_coef: float = knob(1.0, "kl_cov: how strongly", gt=0)
    clip_cov_ratio: float = knob(0.0002, "clip_cov: share of tokens left out of the update", gt=0, le=1)
    clip_cov_lb: float = knob(1.0, "clip_cov: they are drawn from those of at least this covariance")
    clip_cov_ub: float = knob(5.0, "clip_cov: and at most this one")
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = knob(
        "token-mean", "how per-token losses become one number"
    )
    entropy_coeff: float = knob(0.0, "reward for entropy; 0: only logged", ge=0)
    use_kl_loss: bool = knob(False, "keep close to the reference model by a loss term")
    kl_loss_coef: float = knob(0.001, "weight of that term", ge=0)
    kl_loss_type: Literal["k1", "k2", "k3"] = knob("k3", "registered estimator of the divergence")


@dataclass
class RefConfig:
    """The frozen reference model; built only when something needs it."""

    fsdp_config: OffloadConfig = section(OffloadConfig)


@dataclass
class ValSamplingConfig:
    """Sampling for validation."""

    n: int = knob(1, "responses per prompt", ge=1)
    temperature: float = knob(0.0, "0: greedy", ge=0)
    top_p: float = knob(1.0, "nucleus", gt=0, le=1)


@dataclass
class RolloutConfig:
    """The SGLang engines."""

    name: Literal["sglang"] = knob("sglang", "rollout engine")
    n: int = knob(8, "responses per prompt", ge=1)
    temperature: float = knob(1.0, "log-probs are of the distribution after temperature, here and in training", gt=0)
    top_p: float = knob(1.0, "nucleus", gt=0, le=1)
    top_k: int = knob(-1, "most likely tokens kept; -1: all", ge=-1)
    reproducible: bool = knob(True, "seed every response by itself, so a resumed run samples the same tokens")
    dtype: Literal["float32", "bfloat16"] | None = knob(None, "of the engine's weights; unset: model.dtype")
    tensor_model_parallel_size: int = knob(1, "GPUs per engine", ge=1)
    num_engines: int | None = knob(None, "SGLang servers; unset: ranks / tensor_model_parallel_size", ge=1)
    gpu_memory_utilization: float = knob(0.5, "share of a GPU for weights and KV cache of the engine", gt=0, le=1)
    max_num_seqs: int = knob(256, "responses sampled at once by one engine", ge=1)
    max_num_batched_tokens: int = knob(8192, "tokens per prefill", ge=1)
    max_model_len: int | None = knob(None, "context length; unset: prompt + response", ge=1)
    max_total_tokens: int | None = knob(None, "KV cache slots per engine; unset: from memory, on CPU from need", ge=1)
    enable_chunked_prefill: bool = knob(True, "cut long prompts")
    enforce_eager: bool = knob(False, "no CUDA graphs")
    cudagraph_capture_sizes: list[int] | None = knob(None, "batch sizes to capture; unset: SGLang's own", ge=1)
    engine_args: dict[str, Any] = knob({}, "passed on to sglang.launch_server as they are")
    startup_timeout_s: float = knob(600, "an engine that is not up by then is an error", gt=0)
    request_timeout_s: float = knob(3600, "one group of responses may take so long", gt=0)
    val_kwargs: ValSamplingConfig = section(ValSamplingConfig)
    multi_turn: MultiTurnConfig = section(MultiTurnConfig)


@dataclass
class ActorRolloutRefConfig:
    """The policy: model, updates, reference, sampling."""

    model: ModelConfig = section(ModelConfig)
    actor: ActorConfig = section(ActorConfig)
    ref: RefConfig = section(RefConfig)
    rollout: RolloutConfig = section(RolloutConfig)
    weight_sync: WeightSyncConfig = section(WeightSyncConfig)


@dataclass
class CriticModelConfig(ModelConfig):
    """The critic's checkpoint and how it is held; a head for values is added where it has none."""

    path: str | None = knob(None, "Hugging Face checkpoint folder; unset: the actor's")
    dtype: Literal["float32", "bfloat16"] | None = knob(None, "of weights and activations; unset: the actor's")
    enable_gradient_checkpointing: bool | None = knob(
        None, "recompute activations in the backward pass; unset: as the actor does"
    )
    use_remove_padding: bool | None = knob(None, "micro-batches without padding; unset: as the actor's, and never else")


@dataclass
class CriticConfig(TrainedConfig):
    """The model of values, and its updates. Its mini-batches are the actor's."""

    enable: bool | None = knob(None, "unset: where algorithm.adv_estimator needs values (gae)")
    strategy: Literal["deepspeed", "megatron", "torch"] | None = knob(None, "training backend; unset: the actor's")
    model: CriticModelConfig = section(CriticModelConfig)
    ppo_epochs: int | None = knob(None, "passes over each step's samples; unset: the actor's", ge=1)
    ppo_max_token_len_per_gpu: int | None = knob(
        None, "padded tokens per training micro-batch (actor.use_dynamic_bsz); unset: the actor's", ge=1
    )
    ppo_micro_batch_size_per_gpu: int | None = knob(
        None, "sequences per training micro-batch (not actor.use_dynamic_bsz); unset: the actor's", ge=1
    )
    forward_max_token_len_per_gpu: int | None = knob(None, "the same for forward-only passes; unset: ppo_...", ge=1)
    forward_micro_batch_size_per_gpu: int | None = knob(None, "the same for forward-only passes; unset: ppo_...", ge=1)
    cliprange_value: float = knob(0.5, "how far an update may move a value before its gradient ends", gt=0)
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = knob(
        "token-mean", "how per-token losses become one number"
    )


@dataclass
class RewardModelConfig:
    """A reward model in the loop of trainer.task=rl, scored on the training ranks."""

    enable: bool = knob(False, "score responses with a reward model")
    model: ModelConfig = section(ModelConfig)
    fsdp_config: OffloadConfig = section(OffloadConfig)
    coef: float = knob(1.0, "weight of its score in the reward")
    rule_coef: float = knob(0.0, "weight of the rule reward beside it; 0: the rule reward is only logged")
    normalize: bool = knob(False, "scores minus their running mean, divided by their running standard deviation")
    clip: float | None = knob(None, "scores beyond this distance from 0 count as it; unset: as they are", gt=0)


@dataclass
class TrainerConfig:
    """The job: size, length, output."""

    task: Literal["rl", "sft", "dpo", "reward_model"] = knob(
        "rl", "reinforcement learning, fine-tuning on responses, preference optimisation, or training a reward model"
    )
    project_name: str = knob("rlhf_mp", "first folder of the run directory")
    experiment_name: str = knob("run", "second folder of the run directory")
    default_local_dir: str | None = knob(None, "run directory; unset: runs/<project_name>/<experiment_name>")
    nnodes: int = knob(1, "machines", ge=1)
    n_gpus_per_node: int = knob(8, "training ranks on each machine (on CPU too)", ge=1)
    device: Literal["auto", "cuda", "cpu"] = knob("auto", "auto: cuda when there is one")
    seed: int = knob(1, "of everything but data order", ge=0)
    total_epochs: int = knob(1, "passes over the prompts", ge=1)
    total_training_steps: int | None = knob(None, "stop after so many steps; unset: total_epochs", ge=1)
    test_freq: int = knob(-1, "validate every so many steps; -1: only at start and end", ge=-1)
    val_before_train: bool = knob(True, "validate before the first step")
    critic_warmup: int = knob(0, "first steps in which only the critic is updated", ge=0)
    save_freq: int = knob(-1, "checkpoint every so many steps; -1: only at the end", ge=-1)
    max_actor_ckpt_to_keep: int = knob(2, "older checkpoints are removed", ge=1)
    save_hf: Literal["last", "always", "never"] = knob("last", "write a Hugging Face checkpoint too")
    best_metric: str | None = knob(
        None, "e.g. eval/accuracy: the checkpoint of the best validation is written and never removed; unset: none is"
    )
    best_mode: Literal["max", "min"] = knob("max", "whether more or less of best_metric is better")
    resume_mode: Literal["auto", "disable", "resume_path"] = knob("auto", "auto: newest checkpoint of this run")
    resume_from_path: str | None = knob(None, "a global_step_* folder, with resume_mode=resume_path")
    logger: list[Literal["console", "tensorboard", "jsonl", "wandb"]] = knob(
        ["console", "tensorboard", "jsonl"], "where metrics go"
    )
    log_samples: int = knob(2, "prompts whose responses are written to the log each step", ge=0)
    log_val_generations: int = knob(
        8, "prompts of each validation file shown with all responses, token by token, in rollouts/*.html", ge=0
    )
    skip_plan: bool = knob(False, "start even if the planner says that the run cannot fit")
    phase_timeout_s: float = knob(7200, "a phase that takes longer is reported with stacks and ends the run", gt=0)

    @property
    def num_ranks(self) -> int:
        return self.nnodes * self.n_gpus_per_node


@dataclass
class RunConfig:
    """Everything."""

    data: DataConfig = section(DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig)
    critic: CriticConfig = section(CriticConfig)
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    reward: RewardConfig = section(RewardConfig)
    reward_model: RewardModelConfig = section(RewardModelConfig)
    dpo: DpoConfig = section(DpoConfig)
    trainer: TrainerConfig = section(TrainerConfig)

    @property
    def trained(self) -> "list[TrainedModel]":
        """The actor, and the critic where there is one."""
        policy, critic = self.actor_rollout_ref, self.critic
        actor = TrainedModel("actor_rollout_ref.actor", policy.actor, "actor_rollout_ref.model", policy.model)
        return [actor] + [TrainedModel("critic", critic, "critic.model", critic.model)] * (critic.enable is True)

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps between two weight versions."""
        actor = self.actor_rollout_ref.actor
        return self.data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the policy scores its samples before the update.

        With one update per step the policy that is trained is the one that sampled: scoring it first would only
        compute the same log-probs twice.
        """
        by_loss = self.actor_rollout_ref.actor.policy_loss in SELECTING
        return self.updates_per_step > 1 or self.algorithm.use_kl_in_reward or by_loss

    @property
    def needs_reference(self) -> bool:
        return self.actor_rollout_ref.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def data_parallel_size(self) -> int:
        """How many ranks get data of their own; the others hold parts of the same model."""
        return self.trainer.num_ranks // max(trained.updates.model_parallel_size for trained in self.trained)


@dataclass(frozen=True)
class TrainedModel:
    """One of the models that a run trains, with the keys that its sections are written under."""

    key: str
    updates: TrainedConfig
    model_key: str
    model: ModelConfig
