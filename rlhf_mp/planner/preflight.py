"""A run's plan from its config, and the refusal of a run that cannot fit. Reads the model's config.json, nothing else.

Imports neither torch nor a GPU library: nvidia-smi says what cards there are, /proc/meminfo how much host memory.
"""

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_mp.config.reward_model import FrozenModelConfig
from rlhf_mp.config.schema import ActorConfig, MegatronConfig, ModelConfig, RunConfig, TrainedModel
from rlhf_mp.config.task_checks import sequences_per_example
from rlhf_mp.errors import ConfigError, Problem
from rlhf_mp.planner import job as planned
from rlhf_mp.planner.amount import MIB
from rlhf_mp.planner.disk import disk_problems
from rlhf_mp.planner.hardware import Gpu, recognise_gpu
from rlhf_mp.planner.known_models import find_model
from rlhf_mp.planner.nearest_fit import chunk_tokens, nearest_fit
from rlhf_mp.planner.plan import Plan, make_plan
from rlhf_mp.planner.servers import engine_of, reward_server_of
from rlhf_mp.planner.states import lora_params

MODEL_KEY = "actor_rollout_ref.model.path"
SKIP_KEY = "trainer.skip_plan"


@dataclass(frozen=True)
class Machine:
    """What one machine of the run has."""

    gpu: Gpu | None  # None: the run is on the CPU
    host_memory: float | None  # bytes; None: unknown, not judged


def this_machine(config: RunConfig) -> Machine:
    """The cards and the memory of the machine this process is on."""
    gpu = None if config.trainer.device == "cpu" else _installed_gpu()
    return Machine(gpu, _host_memory())


def _installed_gpu() -> Gpu | None:
    """The smallest card that nvidia-smi lists; None where there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True)
    if answer.returncode != 0:  # the driver is there, a card is not
        return None
    cards = []
    for line in answer.stdout.splitlines():
        name, mib = (part.strip() for part in line.rsplit(",", 1))
        memory = float(mib) * MIB
        card = recognise_gpu(name, memory)
        cards.append(replace(card, memory=memory) if card else Gpu(name, memory, 0, 0, 0, 0, "nvidia-smi"))
    return min(cards, key=lambda card: card.memory, default=None)


def _host_memory() -> float | None:
    """Bytes of this machine, or what its container or batch job may use of them."""
    meminfo, limit = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")
    if not meminfo.is_file():  # not Linux
        return None
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    total = float(fields["MemTotal"].split()[0]) * 1024
    allowed = limit.read_text().strip() if limit.is_file() else "max"
    return total if allowed == "max" else min(total, float(allowed))


def job_of(config: RunConfig, machine: Machine) -> planned.Job:
    """What the planner needs of a config.

    Raises:
        ConfigError: the model's config.json is missing, incomplete or of an unknown architecture.
    """
    policy, data, trainer = config.actor_rollout_ref, config.data, config.trainer
    actor, sequence, samples = policy.actor, data.max_length, trainer.task == "rl"
    model, of_actor = policy.model, config.trained[0]
    shape = find_model(model.path)  # by its name, where it is not downloaded yet
    return planned.Job(
        model=shape,
        layout=_layout(of_actor, trainer.num_ranks),
        batch=replace(_batch(of_actor, config, sequence), logit_tokens=_logit_tokens(of_actor, shape.vocab)),
        gpu=machine.gpu,
        algorithm=planned_algorithm(config),
        precision=_precision(of_actor),
        kernels=_kernels(model),
        adapter=_adapter(of_actor, served=policy.weight_sync.adapter_only),
        reference=config.needs_reference if samples else trainer.task == "dpo",
        reference_offload=policy.ref.fsdp_config.param_offload,
        scores_old_policy=samples and config.needs_old_logprobs,
        reward_model=find_model(config.reward_model.model.path) if config.reward_model.enable else None,
        reward_kernels=_kernels(config.reward_model.model),
        reward_offload=config.reward_model.fsdp_config.param_offload,
        reward_quantization=config.reward_model.model.quantization,
        reward_server=reward_server_of(config) if config.reward_model.served else None,
        engine=engine_of(config, sequence, on_gpu=machine.gpu is not None) if samples else None,
        bucket_bytes=policy.weight_sync.bucket_mb * 1e6,
        host_memory=machine.host_memory,
        ranks_per_node=trainer.n_gpus_per_node,
        saves_in_background=trainer.async_save,
        parks=trainer.offload_during_rollout,
        rank_share=trainer.per_process_memory_fraction,
        workload=planned.Workload(
            prompts=data.train_batch_size,
            responses=policy.rollout.n if samples else sequences_per_example(trainer.task),
            prompt_tokens=data.max_prompt_length,
            response_tokens=data.max_response_length,
            epochs=actor.ppo_epochs,
        ),
        **_critic(config, sequence),
    )


def _critic(config: RunConfig, sequence: int) -> dict[str, Any]:
    """What a plan has of the critic, where there is one."""
    if not config.critic.enable:
        return {}
    trained = config.trained[1]
    return {
        "critic": find_model(config.critic.model.path),
        "critic_layout": _layout(trained, config.trainer.num_ranks),
        "critic_batch": _batch(trained, config, sequence),
        "critic_precision": _precision(trained),
        "critic_adapter": _adapter(trained),
        "critic_kernels": _kernels(trained.model),
    }


def planned_algorithm(config: RunConfig) -> planned.Algorithm:
    if config.trainer.task != "rl":
        return config.trainer.task
    return "ppo" if config.critic.enable else "grpo"


def _batch(trained: TrainedModel, config: RunConfig, sequence: int) -> planned.Batch:
    updates = trained.updates
    forward = "log_prob" if isinstance(updates, ActorConfig) else "forward"
    step = config.data.train_batch_size
    cuts = {"ppo": config.actor_rollout_ref.actor.ppo_mini_batch_size if config.trainer.task == "rl" else step}
    cuts[forward] = step
    fitting = []
    for kind, prompts in cuts.items():
        budget = getattr(updates, f"{kind}_max_token_len_per_gpu")
        if not config.actor_rollout_ref.actor.use_dynamic_bsz:
            budget = getattr(updates, f"{kind}_micro_batch_size_per_gpu") * sequence
        # the longest sequences need what fits a micro-batch; fewer of them cannot fill it
        fitting.append(min(budget, _tokens_of(prompts, config, sequence)))
    tokens, score_tokens = fitting
    return planned.Batch(
        tokens=tokens,
        score_tokens=score_tokens,
        sequence=sequence,
        recompute=_recompute(trained),
        recompute_every=trained.model.checkpoint_every_n_layers,
        activation_offload=trained.model.enable_activation_offload,
        offload_layers=trained.model.activation_offload_layers,
    )


def _logit_tokens(trained: TrainedModel, vocab: int) -> int | None:
    """Positions whose float32 logits are one chunk."""
    chunk_mb, megatron = trained.model.logits_chunk_mb, trained.updates.strategy == "megatron"
    slices = trained.updates.megatron.tensor_model_parallel_size if megatron else 1
    return chunk_tokens(chunk_mb, slices, vocab) if chunk_mb else None


def _tokens_of(examples: int, config: RunConfig, sequence: int) -> int:
    """Of one rank's share of so many prompts or examples, at full length; a group is never split."""
    task = config.trainer.task
    each = config.actor_rollout_ref.rollout.n if task == "rl" else sequences_per_example(task)
    return -(-examples // config.data_parallel_size) * each * sequence


def _precision(trained: TrainedModel) -> planned.Precision:
    optim = trained.updates.optim
    name = "sgd-momentum" if optim.optimizer == "sgd" and optim.momentum else optim.optimizer
    return planned.with_optimizer(_arithmetic(trained), name)


def _arithmetic(trained: TrainedModel) -> planned.Precision:
    half = trained.model.dtype == "bfloat16"
    if trained.updates.strategy == "torch":
        return planned.AUTOCAST if half else planned.FP32
    if trained.updates.strategy == "megatron":
        return planned.BF16_FP32_GRADS if half else planned.FP32
    return planned.BF16 if half else planned.FP32


def _kernels(model: ModelConfig | FrozenModelConfig) -> planned.Kernels:
    return planned.EAGER_ATTENTION if model.attn_implementation == "eager" else planned.EAGER


def _adapter(trained: TrainedModel, served: bool = False) -> planned.Adapter | None:
    """LoRA's.

    Raises:
        ConfigError: a target that the planner does not know the size of.
    """
    model = trained.model
    if not model.lora_rank:
        return None
    adapter = planned.Adapter(model.lora_rank, tuple(model.target_modules), model.quantization, served)
    try:
        lora_params(find_model(model.path), adapter)
    except KeyError as error:
        key, reason = f"{trained.model_key}.target_modules", f"the planner does not know the size of {error}"
        raise ConfigError([Problem(key, model.target_modules, reason, f"{key}=all-linear")]) from error
    return adapter


def _layout(trained: TrainedModel, num_ranks: int) -> planned.Layout:
    updates = trained.updates
    if updates.strategy == "torch":
        return planned.TorchLayout()
    if updates.strategy == "megatron":
        return _megatron_layout(updates.megatron, num_ranks, offload=updates.fsdp_config.optimizer_offload)
    own, offload = updates.deepspeed, updates.fsdp_config
    return planned.ZeroLayout(
        num_ranks=num_ranks,
        stage=own.zero_stage,
        param_offload=offload.param_offload and own.zero_stage == 3,
        optimizer_offload=offload.optimizer_offload and own.zero_stage > 0,
        reduce_bucket=own.reduce_bucket_size,
        prefetch_bucket=own.prefetch_bucket_size if offload.forward_prefetch else 0,
    )


def _megatron_layout(own: MegatronConfig, num_ranks: int, *, offload: bool) -> planned.MegatronLayout:
    return planned.MegatronLayout(
        num_ranks=num_ranks,
        tp=own.tensor_model_parallel_size,
        pp=own.pipeline_model_parallel_size,
        vpp=own.virtual_pipeline_model_parallel_size,
        cp=own.context_parallel_size,
        sequence_parallel=own.sequence_parallel,
        distributed_optimizer=own.use_distributed_optimizer,
        optimizer_offload=offload,
    )


def _recompute(trained: TrainedModel) -> planned.Recompute:
    if not trained.model.enable_gradient_checkpointing:
        return "none"
    if trained.updates.strategy == "megatron":
        return trained.updates.megatron.recompute
    return "elementwise" if trained.model.recompute == "selective" else "full"


def plan_of(config: RunConfig, machine: Machine | None = None) -> Plan:
    """What a run needs, phase by phase.

    Args:
        machine: where it runs; None: here.

    Raises:
        ConfigError: the planner cannot read the model's shape.
    """
    return make_plan(job_of(config, machine or this_machine(config)))


def plan_problems(config: RunConfig, machine: Machine | None = None) -> Iterator[Problem]:
    """Why a run cannot fit: by how much, which component, and the nearest plan that does.

    Args:
        machine: where it runs; None: here, where its disk is judged too.
    """
    try:
        job = job_of(config, machine or this_machine(config))
    except ConfigError as error:
        for problem in error.problems:
            yield replace(problem, fix=f"{problem.fix}; or {SKIP_KEY}=true to run without a plan")
        return
    if machine is None:  # another may have another disk
        yield from disk_problems(config, job)
    plan = make_plan(job)
    if plan.fits:
        return
    fix = nearest_fit(job)
    advice = (
        f"{fix}; or {SKIP_KEY}=true to try anyway"
        if fix
        else f"no knob alone makes it fit; {SKIP_KEY}=true to try anyway"
    )
    for reason in plan.problems:
        yield Problem(MODEL_KEY, job.model.name, reason, advice)
