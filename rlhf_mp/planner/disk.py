"""What a run's checkpoints take of a disk, and whether there is so much."""

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rlhf_mp import checkpoint
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.errors import Problem
from rlhf_mp.planner import job as planned
from rlhf_mp.planner.amount import GIB, MIB
from rlhf_mp.planner.plan import checkpoint_copies

KEY = "trainer.default_local_dir"


@dataclass(frozen=True)
class DiskPlan:
    """Bytes that a run writes and keeps; logs, and batches kept for a replay, are left out."""

    checkpoint: float  # one of them, the files of all ranks together
    at_once: int  # of them: those that are kept, and the one that is being written
    export: float  # in Hugging Face's format, at the end

    @property
    def total(self) -> float:
        return self.checkpoint * self.at_once + self.export

    def __str__(self) -> str:
        sizes = [f"{self.at_once} checkpoint(s) of {_size(self.checkpoint)}"]
        if self.export:
            sizes.append(f"the exported model of {_size(self.export)}")
        return f"{_size(self.total)} for {' and '.join(sizes)}"


def disk_plan(config: RunConfig, job: planned.Job) -> DiskPlan:
    states = sum(term.bytes for term in checkpoint_copies(_as_one_rank(job)))
    exported = _exported(config, job) if config.trainer.save_hf != "never" else 0.0
    if config.trainer.save_hf == "always":
        states += exported
    return DiskPlan(states, _at_once(config), exported)


def describe_disk(config: RunConfig, job: planned.Job) -> str:
    run_dir = Path(config.trainer.default_local_dir)
    return f"disk: at most {disk_plan(config, job)}; {_size(free_for(run_dir))} may be used at {run_dir}"


def disk_problems(config: RunConfig, job: planned.Job) -> Iterator[Problem]:
    """A run that would fill its disk, before it has cost anything."""
    run_dir, plan = Path(config.trainer.default_local_dir), disk_plan(config, job)
    room = free_for(run_dir)
    if plan.total <= room:
        return
    fixes = [f"{KEY}=<a folder with more room>", "trainer.skip_plan=true to try anyway"]
    fewest = replace(plan, at_once=min(plan.at_once, _at_once(config, keep=1)), export=0)
    if fewest.total <= room:
        fixes.insert(0, f"trainer.max_actor_ckpt_to_keep=1 and trainer.save_hf=never, which take {_size(fewest.total)}")
    yield Problem(KEY, str(run_dir), f"the run takes {plan}, and {_size(room)} are free there", "; or ".join(fixes))


def free_for(run_dir: Path) -> float:
    """Bytes that a run may fill there: what is free, and what its older checkpoints leave when they go."""
    place = run_dir.absolute()
    while not place.exists():
        place = place.parent
    older = (file for folder in checkpoint.newest_first(run_dir) for file in folder.rglob("*") if file.is_file())
    return shutil.disk_usage(place).free + sum(file.stat().st_size for file in older)


def _as_one_rank(job: planned.Job) -> planned.Job:
    """All ranks together write what one would that has everything: weights once, and the optimizer's part of each."""

    def alone(layout: planned.Layout) -> planned.Layout:
        if isinstance(layout, planned.MegatronLayout):
            return replace(layout, num_ranks=1, tp=1, pp=1, vpp=None, cp=1)
        return replace(layout, num_ranks=1)

    def written(precision: planned.Precision, layout: planned.Layout) -> planned.Precision:
        # Megatron's optimizer writes the weights it steps on, even where they are the model's own
        return replace(precision, master=4) if isinstance(layout, planned.MegatronLayout) else precision

    critic = job.of_critic
    return replace(
        job,
        layout=alone(job.layout),
        precision=written(job.precision, job.layout),
        critic_layout=alone(critic.layout),
        critic_precision=written(critic.precision, critic.layout),
    )


def _exported(config: RunConfig, job: planned.Job) -> float:
    """Every trained model in its own dtype; an adapter beside it is small."""
    sizes = [job.num_actor_params] + ([job.critic.num_params_scalar_head] if job.critic else [])
    return sum(
        size * (2 if trained.model.dtype == "bfloat16" else 4)
        for size, trained in zip(sizes, config.trained, strict=True)
    )


def _at_once(config: RunConfig, keep: int | None = None) -> int:
    trainer = config.trainer
    kept = (keep or trainer.max_actor_ckpt_to_keep) + 1
    if trainer.save_freq == -1:
        kept = 1
    elif trainer.total_training_steps:
        kept = min(kept, math.ceil(trainer.total_training_steps / trainer.save_freq))
    return kept + (trainer.best_metric is not None)


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:,.1f} MiB"
