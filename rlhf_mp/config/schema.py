"""Every knob, its default and its own range. Defaults live here and nowhere else.

Names are those people already write for this kind of trainer; a new name exists only where there was none.
Units are part of a name (``_s``, ``_mb``, ``_gib``) unless the established name has none.
A knob that is unset (``None``) because it follows from others is filled in when a config is loaded, see derive.py.
"""

from dataclasses import dataclass
from typing import Literal

from rlhf_mp.config.algorithm import POLICY_LOSSES, SELECTING, AlgorithmConfig
from rlhf_mp.config.backends import DeepSpeedConfig, MegatronConfig, OffloadConfig
from rlhf_mp.config.data import DataConfig
from rlhf_mp.config.dpo import DpoConfig
from rlhf_mp.config.knob import knob, section
from rlhf_mp.config.reward import RewardConfig
from rlhf_mp.config.reward_model import RewardModelConfig
from rlhf_mp.config.rollout import RolloutConfig, WeightSyncConfig


@dataclass
class ModelConfig:
    """The policy's checkpoint and how it is held."""

    path: str = knob("", "Hugging Face checkpoint folder")
    dtype: Literal["float32", "bfloat16"] = knob("bfloat16", "of weights and activations; the optimizer keeps float32")
    enable_gradient_checkpointing: bool = knob(True, "recompute activations in the backward pass")
    checkpoint_every_n_layers: int = knob(1, "recompute every so-many-th layer; 1: all (gradient checkpointing)", ge=1)
    recompute: Literal["full", "selective"] = knob(
        "full", "of such a layer; selective keeps what matrix products and attention give (torch, DeepSpeed)"
    )
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
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = knob(
        "auto", "auto: flash attention for packed rows where it is installed, else torch's sdpa; eager: plain matrices"
    )
    trust_remote_code: bool = knob(False, "run code that comes with the checkpoint")
    lora_rank: int = knob(0, "train low-rank adapters of this rank instead of the model; usual: 8-64; 0: no LoRA", ge=0)
    lora_alpha: int = knob(16, "adapters count lora_alpha / lora_rank times", ge=1)
    lora_dropout: float = knob(0.0, "of what goes into an adapter, in training; not in RL", ge=0, le=0.9)
    quantization: Literal["nf4", "int8"] | None = knob(
        None, "QLoRA: the base's matrices in 4 or 8 bits (bitsandbytes); unset: none"
    )
    target_modules: list[str] = knob(["all-linear"], "linear layers that get an adapter, by last names, or all-linear")


@dataclass
class OptimConfig:
    """The optimizer and its learning rate."""

    optimizer: Literal["adamw", "sgd"] = knob("adamw", "sgd remembers half as much per weight, nothing at momentum 0")
    lr: float = knob(1e-6, "peak learning rate", gt=0)
    betas: list[float] = knob([0.9, 0.999], "AdamW's two decay rates, each below 1", ge=0)
    eps: float = knob(1e-8, "AdamW's epsilon", gt=0)
    momentum: float = knob(0.9, "sgd's; 0: none", ge=0, le=0.999)
    weight_decay: float = knob(0.01, "decoupled weight decay; sgd's is part of the gradient", ge=0)
    lr_warmup_steps: int = knob(0, "optimizer steps of linear warm-up", ge=0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = knob("constant", "after warm-up")
    min_lr_ratio: float = knob(0.0, "where linear and cosine end, as a share of lr", ge=0, le=1)


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
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] | None = knob(
        None, "how attention is computed; unset: as the actor's"
    )


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
    placement: Literal["colocated", "disjoint"] = knob(
        "colocated",
        "colocated: ranks and engines take turns on the same GPUs (CPU cores); disjoint: engines have their own, "
        "num_engines x tensor_model_parallel_size of them beside those of the ranks",
    )
    offload_during_rollout: bool = knob(
        False,
        "while engines sample, ranks keep only the actor's weights on their GPUs: all else waits on the host, where it "
        "takes as much memory, and is copied out and back once a step",
    )
    seed: int = knob(1, "of everything but data order", ge=0)
    total_epochs: int = knob(1, "passes over the prompts", ge=1)
    total_training_steps: int | None = knob(None, "stop after so many steps; unset: total_epochs", ge=1)
    test_freq: int = knob(-1, "validate every so many steps; -1: only at start and end", ge=-1)
    val_before_train: bool = knob(True, "validate before the first step")
    critic_warmup: int = knob(0, "first steps in which only the critic is updated", ge=0)
    save_freq: int = knob(-1, "checkpoint every so many steps; -1: only at the end", ge=-1)
    async_save: bool = knob(
        False, "write checkpoints while training goes on; takes host memory for a copy of weights and optimizer"
    )
    max_actor_ckpt_to_keep: int = knob(2, "older checkpoints are removed", ge=1)
    save_hf: Literal["last", "always", "never"] = knob("last", "write a Hugging Face checkpoint too")
    best_metric: str | None = knob(
        None, "e.g. eval/accuracy: the checkpoint of the best validation is written and never removed; unset: none is"
    )
    best_mode: Literal["max", "min"] = knob("max", "whether more or less of best_metric is better")
    stop_at: float | None = knob(
        None, "end the run after the validation whose best_metric has come to this; unset: after the last step"
    )
    resume_mode: Literal["auto", "disable", "resume_path"] = knob("auto", "auto: newest checkpoint of this run")
    resume_from_path: str | None = knob(None, "a global_step_* folder, with resume_mode=resume_path")
    logger: list[Literal["console", "tensorboard", "jsonl", "wandb"]] = knob(
        ["console", "tensorboard", "jsonl"], "where metrics go"
    )
    log_samples: int = knob(2, "prompts whose responses are written to the log each step", ge=0)
    log_val_generations: int = knob(
        8, "prompts of each validation file shown with all responses, token by token, in rollouts/*.html", ge=0
    )
    host_allocator: Literal["system", "tcmalloc", "jemalloc"] = knob(
        "system", "malloc of the ranks; the others return more of fragmented host memory"
    )
    empty_cache_every_n_steps: int = knob(
        0, "give back GPU memory that the allocator holds unused, after so many steps' training; 0: never", ge=0
    )
    per_process_memory_fraction: float | None = knob(
        None, "of a GPU: more than this share for a rank's tensors is out of memory; unset: all of it", gt=0, le=1
    )
    timeline: bool = knob(False, "write timeline.json, what ranks and engines did when, for ui.perfetto.dev")
    memory_snapshot_on_oom: bool = knob(
        False, "remember a GPU's allocations, and write logs/memory_rank_*.pickle where they end in out of memory"
    )
    max_skipped_updates: int = knob(
        3, "updates skipped in a row, their loss or gradient being no finite number, that end the run", ge=1
    )
    save_batches: Literal["bad", "all", "off"] = knob(
        "bad",
        "batches kept for launch/replay.py: of steps with a skipped update, or of all since the oldest checkpoint",
    )
    skip_plan: bool = knob(False, "start even if the planner says that the run cannot fit")
    max_engine_restarts: int = knob(
        3, "a rollout engine that dies or hangs is restarted so often; once more, and the run ends", ge=0
    )
    alert_command: str | None = knob(
        None,
        "shell command, run once when the run fails; $RLHF_MP_REASON says why, see docs/reliability.md",
    )
    phase_timeout_s: float = knob(
        7200,
        "a phase, start, checkpoint or export that takes longer ends the run; the logs say where every rank was",
        gt=0,
    )

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
    def engine_machines(self) -> int:
        """Machines that have engines and no ranks; the last of the job."""
        return self.actor_rollout_ref.rollout.nnodes if self.trainer.task == "rl" else 0

    @property
    def machines_per_engine(self) -> int:
        """1, unless engines may be, and are, wider than a machine."""
        rollout = self.actor_rollout_ref.rollout
        wider = rollout.tensor_model_parallel_size // self.trainer.n_gpus_per_node
        return max(1, wider) if rollout.allow_cross_node else 1

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

    def engines_sleep(self, on_gpu: bool) -> bool:
        """Whether engines give their memory back while the trainer works."""
        asked = self.actor_rollout_ref.rollout.free_cache_engine
        takes_turns = on_gpu or self.trainer.offload_during_rollout
        return takes_turns and self.trainer.placement == "colocated" if asked is None else asked

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
