"""The parts of one rank, made from its config and connected: the only place that chooses implementations."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from rlhf_mp.algorithms.base import make_algorithm
from rlhf_mp.checkpoint import model_identity
from rlhf_mp.cluster.guard import Guard
from rlhf_mp.cluster.ranks import Ranks
from rlhf_mp.cluster.services import Services
from rlhf_mp.cluster.stop_request import StopRequest
from rlhf_mp.config.checkpoint_folder import trained_facts
from rlhf_mp.config.load import config_to_dict
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.errors import ConfigError
from rlhf_mp.models.heads import ValueHead
from rlhf_mp.models.hf import DTYPES, load_tokenizer, save_checkpoint
from rlhf_mp.observe.console import ConsoleSink
from rlhf_mp.observe.footprint import Footprint
from rlhf_mp.observe.memory_watch import MemoryWatch
from rlhf_mp.observe.metrics import MetricLog
from rlhf_mp.observe.profiler import set_logging_level
from rlhf_mp.observe.reduce import reduce_over_ranks
from rlhf_mp.observe.rollout_page import Decode
from rlhf_mp.observe.rollout_sink import RolloutPageSink
from rlhf_mp.observe.sinks import JsonlSink, Sink, TensorBoardSink, WandbSink
from rlhf_mp.observe.watchdog import watch
from rlhf_mp.phase import Phase
from rlhf_mp.planner.levers import levers_off
from rlhf_mp.planner.preflight import plan_of, this_machine
from rlhf_mp.planner.term import Role
from rlhf_mp.rollout.sglang_client import EngineControl
from rlhf_mp.train.base import Scorer, TrainEngine
from rlhf_mp.train.build import make_actor, make_critic, make_reference, make_reward_scorer, trained_head
from rlhf_mp.trainer.best import Best
from rlhf_mp.trainer.checkpoints import RunCheckpoints
from rlhf_mp.trainer.loop import Schedule
from rlhf_mp.trainer.reward_model import RewardModel
from rlhf_mp.trainer.trainer import Trainer
from rlhf_mp.weights.base import Transport, WeightSync
from rlhf_mp.weights.buckets import Packer
from rlhf_mp.weights.canary import make_canary
from rlhf_mp.weights.disk import DiskTransport
from rlhf_mp.weights.distributed import DistributedTransport
from rlhf_mp.weights.swap import VerifiedSwap
from rlhf_mp.weights.tensor import TensorTransport


@dataclass(frozen=True)
class Job:
    """What a rank has once everything is started."""

    config: RunConfig
    ranks: Ranks
    services: Services | None  # None for tasks that sample nothing
    device: torch.device
    guard: Guard
    stop_request: StopRequest
    on_hang: Callable[[str], None]  # says why, and ends this process


def make_trainer(job: Job) -> Trainer:
    """All parts of this rank, resumed where the newest checkpoint stands. Collective.

    Engines are built while the SGLang servers start.
    """
    set_logging_level()
    knobs, algorithm, facts = job.config.trainer, make_algorithm(job.config), job.services.facts()
    torch.manual_seed(knobs.seed + job.ranks.rank)
    num_steps = knobs.total_training_steps or knobs.total_epochs * facts.steps_per_epoch
    epochs, warmup = job.config.actor_rollout_ref.actor.ppo_epochs, knobs.critic_warmup
    updates = job.config.updates_per_step
    actor = make_actor(job.config, job.device, (num_steps - warmup) * updates)
    critic = None
    if job.config.critic.enable:
        critic = make_critic(job.config, job.device, num_steps * updates // epochs * job.config.critic.ppo_epochs)
    reference = make_reference(job.config, job.device) if algorithm.needs_reference else None
    models = {Role.actor: actor, Role.critic: critic, Role.reference: reference}
    footprint = make_footprint(job, {role: model for role, model in models.items() if model is not None})
    memory = make_memory_watch(job)

    def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
        return job.ranks.sum(x, counts=actor.layout.is_output_rank)

    own, reward_model = job.config.reward_model, None
    if own.enable:
        reward_model = RewardModel(make_reward_scorer(job.config, job.device), own, sum_over_ranks)
    trainer = Trainer(
        schedule=Schedule(num_steps, knobs.test_freq, knobs.save_freq, knobs.val_before_train, warmup),
        actor=actor,
        critic=critic,
        reference=reference,
        algorithm=algorithm,
        rollouts=job.services.client.with_share(actor.layout.dp_rank),
        swap=make_swap(job),
        checkpoints=make_checkpoints(job, {"actor": actor} | ({"critic": critic} if critic else {})),
        log=MetricLog([], reduce_over_ranks),
        watch=lambda phase: watched(job, phase, memory, footprint),
        memory=lambda: memory.metrics() | (footprint.metrics() if footprint else {}),
        has_validation=facts.num_validation > 0,
        reward_model=reward_model,
        packed=job.config.actor_rollout_ref.model.use_remove_padding,
        sum_over_ranks=sum_over_ranks,
        counts=actor.layout.is_output_rank,
        stop_requested=job.stop_request.made,
        best=Best(knobs.best_metric, knobs.best_mode) if knobs.best_metric else None,
    )
    trainer.resume()
    if job.ranks.rank == 0:
        print(
            f"{facts.num_prompts} prompts ({facts.num_dropped} dropped, {facts.num_truncated} cut: longer than "
            f"data.max_prompt_length), {facts.num_validation} for validation, {num_steps} steps"
        )
        print(*facts.notes, sep="\n", end="\n" if facts.notes else "")
        trainer.log.sinks = make_sinks(job, num_steps, trainer.step)
    return trainer


@contextmanager
def watched(job: Job, phase: Phase, memory: MemoryWatch, footprint: Footprint | None) -> Iterator[None]:
    timeout_s = job.config.trainer.phase_timeout_s
    message = f"phase {phase.value} lasted longer than {timeout_s:g} s (trainer.phase_timeout_s)"
    measured = footprint.during(phase) if footprint else nullcontext()
    with watch(phase, job.ranks.rank, timeout_s, lambda: job.on_hang(message)), memory.during(phase), measured:
        yield


def make_footprint(job: Job, models: Mapping[Role, Scorer]) -> Footprint | None:
    """Of rank 0; None elsewhere, and for a model that the planner cannot count (``trainer.skip_plan``)."""
    if job.ranks.rank != 0:
        return None
    try:
        packed = job.config.actor_rollout_ref.model.use_remove_padding
        return Footprint(models, plan_of(job.config), job.device, packed=packed)
    except ConfigError:
        return None


def make_memory_watch(job: Job) -> MemoryWatch:
    machine = this_machine(job.config)

    def needed(config: RunConfig, phase: Phase) -> float:
        moment = plan_of(config, machine).peak_of(phase)
        return (moment.gpu_bytes if machine.gpu else moment.host_bytes) if moment else 0.0

    by_plan = None if job.config.trainer.skip_plan else needed  # skipped where the planner cannot read the model
    return MemoryWatch(job.device, job.ranks.rank, lambda phase: levers_off(job.config, phase, by_plan))


def make_swap(job: Job) -> VerifiedSwap:
    """Waits for the engines."""
    policy, data = job.config.actor_rollout_ref, job.config.data
    own, addresses = policy.weight_sync, job.services.addresses()
    is_sender = job.ranks.rank == 0
    if is_sender:
        print(
            f"{len(addresses)} SGLang engine(s) ready {time.monotonic() - job.services.started:.0f} s after their start"
        )
    controls = [EngineControl(f"SGLang engine {i}", address, own.timeout_s) for i, address in enumerate(addresses)]
    transport = make_transport(job)
    sync = WeightSync(
        transport,
        controls if is_sender else [],
        Packer(own.bucket_mb * 10**6, job.device, shared=transport.shared_buffers),
        dtype=DTYPES[policy.rollout.dtype],
        is_sender=is_sender,
        workers_per_engine=policy.rollout.tensor_model_parallel_size,
    )
    canary = make_canary(
        model_identity(Path(policy.model.path))["vocab_size"],
        max_prompt=data.max_prompt_length,
        max_response=data.max_response_length,
        temperature=policy.rollout.temperature,
        tolerance=own.canary_tolerance,
        seed=job.config.trainer.seed,
    )
    return VerifiedSwap(sync, canary, job.ranks.broadcast)


def make_transport(job: Job) -> Transport:
    policy = job.config.actor_rollout_ref
    workers, on_cpu = policy.rollout.tensor_model_parallel_size, job.device.type == "cpu"
    match policy.weight_sync.transport:
        case "tensor":
            return TensorTransport(workers, job.ranks.gather, on_cpu)
        case "distributed":
            return DistributedTransport(workers, job.services.hosts[0].address, on_cpu)
        case "disk":
            return DiskTransport(job.guard.run_dir / "weights", job.ranks.rank == 0)


def make_checkpoints(job: Job, trained: dict[str, TrainEngine]) -> RunCheckpoints:
    knobs = job.config.trainer
    return RunCheckpoints(
        job.guard.run_dir,
        job.ranks,
        keep=knobs.max_actor_ckpt_to_keep,
        resume_from=Path(knobs.resume_from_path) if knobs.resume_mode == "resume_path" else None,
        resume=knobs.resume_mode != "disable",
        identity=model_identity(Path(job.config.actor_rollout_ref.model.path)),
        trained=trained_facts(job.config),
        export=(lambda folder: export(job, trained, folder)) if knobs.save_hf == "always" else None,
        say=print,
    )


def export(job: Job, trained: dict[str, TrainEngine], folder: Path) -> None:
    """Collective. Write the trained model as a Hugging Face checkpoint, and the critic beside it."""
    config = job.config
    sources = {
        "actor": (config.actor_rollout_ref.model, trained_head(config), folder),
        "critic": (config.critic.model, ValueHead(), folder.with_name(f"{folder.name}_critic")),
    }
    for name, engine in trained.items():
        model, head, place = sources[name]
        weights = engine.weights()
        if job.ranks.rank == 0:
            save_checkpoint(weights, model.path, place, DTYPES[model.dtype], head.saved_config)
        else:
            for _ in weights:  # gathering them takes all ranks
                pass
        job.ranks.barrier()


def make_sinks(job: Job, num_steps: int, steps_done: int) -> list[Sink]:
    knobs, run_dir, console = job.config.trainer, job.guard.run_dir, job.guard.console
    first = steps_done + 1 if steps_done else 0
    sinks: list[Sink] = [JsonlSink(run_dir, first)]  # always: summary.json is made from it
    if "console" in knobs.logger:
        terminal = console.isatty()
        sinks.append(ConsoleSink(console if terminal else sys.stdout, terminal, num_steps, steps_done))
    if "tensorboard" in knobs.logger:
        sinks.append(TensorBoardSink(run_dir / "tensorboard", first))
    if "wandb" in knobs.logger:
        sinks.append(WandbSink(knobs.project_name, knobs.experiment_name, config_to_dict(job.config), run_dir))
    if knobs.log_val_generations > 0:
        sinks.append(RolloutPageSink(run_dir / "rollouts", run_dir.name, lambda: page_decoder(job.config), print))
    return sinks


def page_decoder(config: RunConfig) -> Decode:
    model = config.actor_rollout_ref.model
    tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
