"""One rank, from its config to its exit code."""

import contextlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_mp.cluster.guard import Guard, start_guard
from rlhf_mp.cluster.launcher import RankInfo
from rlhf_mp.cluster.network import join_network
from rlhf_mp.cluster.stacks import request_stacks
from rlhf_mp.config.load import config_to_dict, dump_config
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.errors import (
    CheckpointError,
    ConfigError,
    DivergedError,
    EngineError,
    OutOfMemory,
    RewardError,
    SampleError,
    SyncError,
)
from rlhf_mp.host_allocator import loaded_allocator
from rlhf_mp.observe.watchdog import watch
from rlhf_mp.prepare import EXIT_CONFIG

if TYPE_CHECKING:
    import torch

    from rlhf_mp.assemble import HangWatch, Job
    from rlhf_mp.cluster.ranks import Ranks
    from rlhf_mp.cluster.services import Here, Services
    from rlhf_mp.trainer.best import Best
    from rlhf_mp.trainer.trainer import Trainer

EXIT_FAILED = 1
CUDA_CONF = "PYTORCH_CUDA_ALLOC_CONF"
EXPLAINED = (
    ConfigError, CheckpointError, DivergedError, EngineError, OutOfMemory, RewardError, SampleError, SyncError,
)  # fmt: skip
"""Errors whose text says it all; any other comes with its traceback."""


def train_to_the_end(job: "Job", trainer: "Trainer") -> None:
    """What a run normally does with its trainer."""
    from rlhf_mp.assemble import export

    trainer.train()
    if not trainer.finished:
        trainer.log.close()
        job.stop_request.fulfil()
        if job.ranks.rank == 0:
            print(f"stopped on request after step {trainer.step}; the same command continues")
        return
    if job.config.trainer.save_hf != "never":
        with job.watched("the export"):
            export(job, trainer.trained, job.guard.run_dir / "huggingface")
    trainer.log.close()
    if job.ranks.rank == 0:
        finish(job.config, job.guard.run_dir, trainer.best)


def run(config: RunConfig, info: RankInfo, work: Callable[["Job", "Trainer"], None] = train_to_the_end) -> int:
    """Do ``work`` with everything started. Returns 0 when all went well; otherwise ends the process, with its code."""
    with launched(config, info) as (job, trainer):
        work(job, trainer)
    return 0


@contextmanager
def launched(config: RunConfig, info: RankInfo) -> Iterator[tuple["Job", "Trainer"]]:
    """Collective. Everything started, and ended with the block. An error inside it is reported and ends the process."""
    knobs = config.trainer
    if not info.trains and info.local_rank > 0:  # a machine of engines needs one process
        sys.exit(0)
    guard = start_guard(
        info.rank, Path(knobs.default_local_dir), several_hosts=info.several_hosts, alert=knobs.alert_command
    )
    os.environ["TMPDIR"] = str(guard.tmp)  # what Ray and SGLang leave there goes with the job
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # end at once even inside a collective; the guard cleans up
    try:
        if info.trains:
            with started(config, info, guard) as parts:
                yield parts
        else:
            keep(info, guard)
    except EXPLAINED as error:
        leave(guard, EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED, f"rank {info.rank}", str(error))
    except BaseException:  # whatever it is, the user reads about it before the other ranks' broken connections
        leave(guard, EXIT_FAILED, f"rank {info.rank}", traceback.format_exc())
    guard.farewell(0)
    if not info.trains:  # whatever the caller does with a trainer
        sys.exit(0)


def keep(info: RankInfo, guard: Guard) -> None:
    """All that is done on a machine that has engines and no ranks."""
    quiet()
    from rlhf_mp.cluster.engine_machines import keep_machine

    keep_machine(info, join_network(info), guard.tmp, guard.run_dir)


def leave(
    guard: Guard, exit_code: int, what: str, message: str, log: Path | None = None, *, witnessed: bool = False
) -> None:
    """Report, and end this process without waiting for peers that may hang; the guard ends what is left."""
    sys.stdout.flush()
    sys.stderr.flush()
    guard.report(what, message, log, witnessed=witnessed)
    # What follows from an earlier failure is not for the terminal. A full disk must not change the exit code.
    with contextlib.suppress(OSError), guard.log.open("a") as own_log:
        own_log.write(f"{what}: {message}\n")
    guard.farewell(exit_code)
    os._exit(exit_code)


@contextmanager
def started(config: RunConfig, info: RankInfo, guard: Guard) -> Iterator[tuple["Job", "Trainer"]]:
    """Join the ranks, start the engines, assemble the trainer; take all down again after a block that went well."""
    quiet()
    import torch

    on_cpu = config.trainer.device == "cpu" or not torch.cuda.is_available()
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"  # otherwise DeepSpeed looks for a GPU and warns that there is none
    if config.trainer.task == "rl":  # the others have no engines
        config.actor_rollout_ref.rollout.free_cache_engine = config.engines_sleep(on_gpu=not on_cpu)

    from rlhf_mp.assemble import make_trainer
    from rlhf_mp.assemble_supervised import make_supervised_trainer
    from rlhf_mp.cluster.ranks import leave_ranks

    device = torch.device("cpu" if on_cpu else f"cuda:{info.local_rank}")
    watched = hang_watch(config.trainer.phase_timeout_s, info, guard)
    with watched("the start"):
        job = join_job(config, info, guard, device, watched)
        make = make_trainer if config.trainer.task == "rl" else make_supervised_trainer
        trainer = make(job)
    yield job, trainer
    with watched("the end"):
        if job.services is not None:
            job.services.stop()
        leave_ranks()


def hang_watch(timeout_s: float, info: RankInfo, guard: Guard) -> "HangWatch":
    """What goes around every part of the run: one that hangs ends it, and says where every rank was."""

    def end(reason: str) -> None:
        request_stacks(guard.tmp)
        where = f"where every rank was stands in {guard.run_dir / 'logs'}/rank_*.log"
        leave(guard, EXIT_FAILED, f"rank {info.rank}", f"{reason}; {where}", guard.log)

    return lambda what: watch(what, timeout_s, end)


def join_job(config: RunConfig, info: RankInfo, guard: Guard, device: "torch.device", watched: "HangWatch") -> "Job":
    """Collective. The ranks have met, and their services are starting."""
    import torch

    from rlhf_mp.algorithms.base import make_algorithm
    from rlhf_mp.assemble import Job
    from rlhf_mp.cluster.ranks import Ranks, check_shared
    from rlhf_mp.cluster.services import Here
    from rlhf_mp.cluster.stop_request import StopRequest
    from rlhf_mp.observe.timeline import make_timeline
    from rlhf_mp.train.build import join_ranks
    from rlhf_mp.train.compiler_locks import build_root, remove_abandoned_locks
    from rlhf_mp.train.cuda_allocator import limit_share

    make_algorithm(config)  # a function of one's own that cannot work is told before anything starts
    on_cpu = device.type == "cpu"
    if not on_cpu:
        torch.cuda.set_device(device)
    limit_share(device, config.trainer.per_process_memory_fraction)
    if info.rank == 0:
        dump_config(config, guard.run_dir / "config.yaml")
        print(f"run directory {guard.run_dir}\n{allocators(on_cpu)}")
    if info.local_rank == 0 and config.trainer.nnodes == 1:  # several hosts may share the folder
        for lock in remove_abandoned_locks(build_root()):
            print(f"removed {lock}: a run was killed while it compiled")
    address = join_network(info)
    join_ranks(config, device)
    ranks = Ranks(info.rank, info.world_size)
    if info.several_hosts:
        check_shared(guard.run_dir, ranks)
    samples = config.trainer.task == "rl"
    return Job(
        config,
        ranks,
        start_services(config, on_cpu, ranks, Here(info, address, guard.tmp), guard) if samples else None,
        device=device,
        guard=guard,
        stop_request=StopRequest(guard.run_dir, info.rank == 0, ranks.broadcast),
        watched=watched,
        timeline=make_timeline(config, guard.run_dir, f"rank {info.rank}", info.rank + 1),
    )


def start_services(config: RunConfig, on_cpu: bool, ranks: "Ranks", here: "Here", guard: Guard) -> "Services":
    """Collective. The scheduler and the engines, where the placement has them."""
    from rlhf_mp.cluster.cores import compute_on
    from rlhf_mp.cluster.engine_machines import EngineMachines
    from rlhf_mp.cluster.placement import place
    from rlhf_mp.cluster.services import Services

    cores = ranks.gather(tuple(sorted(os.sched_getaffinity(0))))[:: config.trainer.n_gpus_per_node]
    if here.info.engine_machines:
        here = replace(here, engine_machines=EngineMachines(here.info, guard.run_dir) if ranks.rank == 0 else None)
        found = here.engine_machines.machines if here.engine_machines else ()
        cores += ranks.broadcast([tuple(machine.cores) for machine in found])
    placement = place(config, on_cpu, cores)
    services = Services(
        config,
        placement,
        ranks,
        here,
        guard.run_dir / "logs",
        on_end=lambda what, how, log: leave(guard, EXIT_FAILED, what, how, log, witnessed=True),
    )
    if placement.rank_cores:
        compute_on(placement.rank_cores[ranks.rank])  # only now: Ray, a child of rank 0, would inherit it
    return services


def allocators(on_cpu: bool) -> str:
    """What manages this process's memory."""
    host = f"host memory: {loaded_allocator(Path('/proc/self/maps').read_text())} malloc"
    return host if on_cpu else f"{host}; CUDA memory: {CUDA_CONF}={os.environ.get(CUDA_CONF, 'unset')}"


def quiet() -> None:
    """Silence warnings of libraries about each other that nobody who reads our output can act on."""
    for message in ("Failed to load image Python extension", "`torch.distributed.*` is deprecated"):
        warnings.filterwarnings("ignore", message=message)
    warnings.filterwarnings("ignore", module=r"megatron\.|mbridge\.")


def finish(config: RunConfig, run_dir: Path, best: "Best | None") -> None:
    """summary.json, and the table at the end."""
    from rlhf_mp import checkpoint
    from rlhf_mp.observe.plan_check import table
    from rlhf_mp.observe.sinks import read_jsonl
    from rlhf_mp.observe.summary import before_after_table, write_summary
    from rlhf_mp.observe.timeline import put_together

    paths = {"summary": str(run_dir / "summary.json"), "metrics": str(run_dir / "metrics.jsonl")}
    if "tensorboard" in config.trainer.logger:
        paths["tensorboard"] = str(run_dir / "tensorboard")
    if saved := checkpoint.newest_first(run_dir):
        paths["checkpoint"] = str(saved[0])
    if best is not None and best.step is not None:
        paths["best checkpoint"] = str(checkpoint.folder_of(run_dir, best.step))
    if (run_dir / "rollouts").is_dir():
        paths["rollouts"] = str(run_dir / "rollouts")
    if timeline := put_together(run_dir):
        paths["timeline"] = str(timeline)
    if config.trainer.save_hf != "never":
        paths["hf"] = str(run_dir / "huggingface")
        if config.critic.enable:
            paths["hf_critic"] = str(run_dir / "huggingface_critic")
        if config.actor_rollout_ref.model.lora_rank:
            paths["adapter"] = str(run_dir / "huggingface_adapter")
    records = read_jsonl(run_dir / "metrics.jsonl")
    summary = write_summary(
        run_dir / "summary.json",
        records,
        config=config_to_dict(config),
        paths=paths,
        best=best.state_dict() if best is not None else None,
    )
    print("\n" + before_after_table(summary))
    if summary["memory"]:
        print("\n" + table(summary["memory"]))
