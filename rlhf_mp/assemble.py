"""The parts of one rank, made from its config and connected: the only place that chooses implementations."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from rlhf_mp.algorithms.base import make_algorithm
from rlhf_mp.checkpoint import model_identity
from rlhf_mp.cluster.guard import Guard
from rlhf_mp.cluster.ranks import Ranks
from rlhf_mp.cluster.roster import PoolRoster
from rlhf_mp.cluster.services import Services
from rlhf_mp.cluster.stop_request import StopRequest
from rlhf_mp.config.checkpoint_folder import trained_facts
from rlhf_mp.config.load import config_to_dict, config_to_yaml
from rlhf_mp.config.rollout import WeightSyncConfig
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.errors import ConfigError
from rlhf_mp.models.heads import ValueHead
from rlhf_mp.models.hf import DTYPES, load_tokenizer, save_checkpoint
from rlhf_mp.observe.allocation_history import AllocationHistory
from rlhf_mp.observe.console import ConsoleSink
from rlhf_mp.observe.footprint import Footprint
from rlhf_mp.observe.gpu_utilization import GpuUtilization, nvml_reader
from rlhf_mp.observe.memory_watch import MemoryWatch
from rlhf_mp.observe.metrics import MetricLog
from rlhf_mp.observe.profiler import set_logging_level
from rlhf_mp.observe.reduce import reduce_over_ranks
from rlhf_mp.observe.rollout_page import Decode
from rlhf_mp.observe.rollout_sink import RolloutPageSink
from rlhf_mp.observe.sinks import JsonlSink, Sink, TensorBoardSink, WandbSink
from rlhf_mp.observe.timeline import Timeline
from rlhf_mp.phase import Phase
from rlhf_mp.planner.levers import levers_off
from rlhf_mp.planner.preflight import plan_of, this_machine
from rlhf_mp.planner.term import Role
from rlhf_mp.train.base import Scorer, TrainEngine
from rlhf_mp.train.build import make_actor, make_critic, make_reference, make_reward_scorer, trained_head
from rlhf_mp.train.cuda_allocator import EmptiedCache
from rlhf_mp.train.parking import Parking
from rlhf_mp.trainer.best import Best
from rlhf_mp.trainer.checkpoints import RunCheckpoints
from rlhf_mp.trainer.loop import Schedule
from rlhf_mp.trainer.reward_model import RewardModel, SampledScores
from rlhf_mp.trainer.trainer import Trainer
from rlhf_mp.trainer.updates import KeptBatches, Updates
from rlhf_mp.weights.base import Transport, WeightSync
from rlhf_mp.weights.buckets import Packer
from rlhf_mp.weights.canary import make_canary
from rlhf_mp.weights.disk import DiskTransport
from rlhf_mp.weights.distributed import DistributedTransport
from rlhf_mp.weights.swap import Sent, VerifiedSwap, whole_model
from rlhf_mp.weights.tensor import TensorTransport

HangWatch = Callable[[str], AbstractContextManager[None]]
"""Goes around a part of the run, which it names; one that lasts too long ends the process and says why."""


@dataclass(frozen=True)
class Job:
    """What a rank has once everything is started."""

    config: RunConfig
    ranks: Ranks
    services: Services | None  # None for tasks that sample nothing
    device: torch.device
    guard: Guard
    stop_request: StopRequest
    watched: HangWatch
    timeline: Timeline = field(default_factory=Timeline)


def make_trainer(job: Job) -> Trainer:
    """All parts of this rank, resumed where the newest checkpoint stands. Collective.

    Engines are built while the SGLang servers start.
    """
    set_logging_level()
    knobs, algorithm, facts = job.config.trainer, make_algorithm(job.config), job.services.facts()
    torch.manual_seed(knobs.seed + job.ranks.rank)
    num_steps = knobs.total_training_steps or knobs.total_epochs * facts.steps_per_epoch
    trained = make_trained(job.config, job.device, num_steps)
    actor, critic = trained["actor"], trained.get("critic")
    reference = make_reference(job.config, job.device, actor) if algorithm.needs_reference else None
    models = {Role.actor: actor, Role.critic: critic, Role.reference: reference}
    around, metrics = make_observers(job, {role: model for role, model in models.items() if model is not None})

    def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
        return job.ranks.sum(x, counts=actor.layout.is_output_rank)

    own, scorer, reward_model = job.config.reward_model, None, None
    if own.enable:
        scorer = None if own.served else make_reward_scorer(job.config, job.device)
        reward_model = RewardModel(scorer or SampledScores(), own, sum_over_ranks)
    trainer = Trainer(
        schedule=Schedule(num_steps, knobs.test_freq, knobs.save_freq, knobs.val_before_train, knobs.critic_warmup),
        actor=actor,
        critic=critic,
        reference=reference,
        algorithm=algorithm,
        rollouts=job.services.client.with_share(actor.layout.dp_rank),
        swap=make_swap(job, make_parking(job, [*models.values(), scorer])),
        checkpoints=make_checkpoints(job, trained),
        log=MetricLog([], reduce_over_ranks),
        watch=lambda phase: watched(job, phase, around),
        bounded=job.watched,
        span=job.timeline.span,
        memory=metrics,
        has_validation=facts.num_validation > 0,
        reward_model=reward_model,
        packed=job.config.actor_rollout_ref.model.use_remove_padding,
        sum_over_ranks=sum_over_ranks,
        counts=actor.layout.is_output_rank,
        stop_requested=job.stop_request.made,
        best=Best(knobs.best_metric, knobs.best_mode, stop_at=knobs.stop_at) if knobs.best_metric else None,
        updates=make_updates(job, actor),
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


def make_parking(job: Job, models: Sequence[Scorer | None]) -> Parking:
    """Of everything on this rank, if the run asks for it."""
    held = [m for m in models if m is not None] if job.config.trainer.offload_during_rollout else []
    return Parking(held, job.device, lambda: job.ranks.broadcast(None))


def make_trained(config: RunConfig, device: torch.device, num_steps: int) -> dict[str, TrainEngine]:
    """The models that a run trains, by name."""
    if config.trainer.task != "rl":
        return {"actor": make_actor(config, device, num_steps)}
    updates = config.updates_per_step
    actor = make_actor(config, device, (num_steps - config.trainer.critic_warmup) * updates)
    if not config.critic.enable:
        return {"actor": actor}
    passes = num_steps * updates // config.actor_rollout_ref.actor.ppo_epochs
    return {"actor": actor, "critic": make_critic(config, device, passes * config.critic.ppo_epochs)}


Around = Callable[[Phase], AbstractContextManager]
"""What goes around every run of a phase."""


@contextmanager
def watched(job: Job, phase: Phase, around: Sequence[Around]) -> Iterator[None]:
    with job.watched(f"phase {phase.value}"), ExitStack() as stack:
        for during in around:
            stack.enter_context(during(phase))
        yield


def make_observers(job: Job, models: Mapping[Role, Scorer]) -> tuple[list[Around], Callable[[], dict[str, float]]]:
    """What goes around every phase, the outermost first, and the metrics that come of it."""
    footprint = make_footprint(job, models)
    observers = [make_memory_watch(job), GpuUtilization(nvml_reader(job.device)), *([footprint] if footprint else [])]
    cache = EmptiedCache(job.device, job.config.trainer.empty_cache_every_n_steps)

    def metrics() -> dict[str, float]:
        return {name: value for observer in observers for name, value in observer.metrics().items()}

    inside = [observer.during for observer in observers] + [cache.during]
    return [lambda phase: job.timeline.span(phase.value), *inside], metrics


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
    history = None
    if job.config.trainer.memory_snapshot_on_oom and job.device.type == "cuda":
        history = AllocationHistory(job.guard.run_dir / "logs" / f"memory_rank_{job.ranks.rank}.pickle")
    return MemoryWatch(
        job.device, job.ranks.rank, lambda phase: levers_off(job.config, phase, by_plan), history=history
    )


def make_swap(job: Job, parking: Parking) -> VerifiedSwap:
    """Waits for the engines."""
    policy, data = job.config.actor_rollout_ref, job.config.data
    own, addresses = policy.weight_sync, job.services.addresses()
    is_sender = job.ranks.rank == 0
    if is_sender:
        print(
            f"{len(addresses)} SGLang engine(s) ready {time.monotonic() - job.services.started:.0f} s after their start"
        )
    transport, prompt_s = make_transport(job), policy.rollout.health_check_timeout_s
    sync = WeightSync(
        transport,
        PoolRoster(job.services.client.actor, len(addresses), own.timeout_s, prompt_s) if is_sender else None,
        Packer(own.bucket_mb * 10**6, job.device, shared=transport.shared_buffers),
        dtype=DTYPES[policy.rollout.dtype],
        is_sender=is_sender,
        workers_per_engine=policy.rollout.tensor_model_parallel_size,
        base_stays=own.adapter_only,
    )
    canary = make_canary(
        model_identity(Path(policy.model.path))["vocab_size"],
        max_prompt=data.max_prompt_length,
        max_response=data.max_response_length,
        temperature=policy.rollout.temperature,
        tolerance=own.canary_tolerance,
        seed=job.config.trainer.seed,
    )
    free_bytes = None if job.device.type == "cpu" else lambda: torch.cuda.mem_get_info(job.device)[0]
    return VerifiedSwap(
        sync,
        canary,
        job.ranks.broadcast,
        sleeps=policy.rollout.free_cache_engine,
        free_bytes=free_bytes,
        parking=parking,
        sent=what_swaps_bring(own),
    )


def what_swaps_bring(knobs: WeightSyncConfig) -> Sent:
    if not knobs.adapter_only:
        return whole_model
    from rlhf_mp.train.adapted import adapter_weights  # imports peft

    return adapter_weights


def make_transport(job: Job) -> Transport:
    policy = job.config.actor_rollout_ref
    workers, on_cpu = policy.rollout.tensor_model_parallel_size, job.device.type == "cpu"
    match policy.weight_sync.transport:
        case "tensor":
            return TensorTransport(workers, job.ranks.gather, on_cpu)
        case "distributed":
            return DistributedTransport(workers, job.services.hosts[0].address, on_cpu, policy.weight_sync.timeout_s)
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
        in_background=knobs.async_save,
    )


def make_updates(job: Job, actor: TrainEngine) -> Updates:
    knobs, ranks = job.config.trainer, job.ranks
    config = config_to_yaml(job.config) if ranks.rank == 0 else None
    keeper = KeptBatches(job.guard.run_dir, ranks.barrier, actor.layout, knobs.save_batches, config)
    return Updates(knobs.max_skipped_updates, keeper, print if ranks.rank == 0 else lambda text: None)


def export(job: Job, trained: dict[str, TrainEngine], folder: Path) -> None:
    """Collective. Write the trained model as a Hugging Face checkpoint, and the critic beside it; adapters too."""
    export_models(job.config, job.ranks, trained, folder)


def export_models(config: RunConfig, ranks: Ranks, trained: dict[str, TrainEngine], folder: Path) -> None:
    sources = {
        "actor": (config.actor_rollout_ref.model, trained_head(config), folder),
        "critic": (config.critic.model, ValueHead(), folder.with_name(f"{folder.name}_critic")),
    }
    for name, engine in trained.items():
        model, head, place = sources[name]
        write = partial(
            save_checkpoint,
            source=model.path,
            directory=place,
            dtype=DTYPES[model.dtype],
            saved_config=head.saved_config,
        )
        _written_by_one(ranks, engine.weights(), write)
        if model.lora_rank:
            from rlhf_mp.models.lora import save_adapter
            from rlhf_mp.train.adapted import adapter_weights

            beside = place.with_name(f"{place.name}_adapter")
            write = partial(save_adapter, module=engine.module, directory=beside)
            _written_by_one(ranks, adapter_weights(engine), write)


def _written_by_one(ranks: Ranks, tensors: Iterator[tuple[str, torch.Tensor]], write: Callable) -> None:
    """Collective: gathering the tensors takes all ranks, and one of them writes."""
    if ranks.rank == 0:
        write(tensors)
    else:
        for _ in tensors:
            pass
    ranks.barrier()


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
