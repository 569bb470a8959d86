"""One training step made again from its saved batch, on any backend, and compared with what was logged of it."""

import gc
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from rlhf_mp import checkpoint
from rlhf_mp.algorithms.base import make_algorithm
from rlhf_mp.algorithms.supervised import make_task
from rlhf_mp.assemble import export_models, make_trained
from rlhf_mp.cluster.launcher import RankInfo
from rlhf_mp.cluster.ranks import Ranks
from rlhf_mp.config.replay import Replay
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.config.task_checks import sequences_per_example
from rlhf_mp.data import step_batch
from rlhf_mp.data.step_batch import StepBatch
from rlhf_mp.data.types import LossFn, Sums
from rlhf_mp.errors import CheckpointError
from rlhf_mp.observe.reduce import added, reduce_over_ranks
from rlhf_mp.observe.sinks import read_jsonl
from rlhf_mp.train.base import TrainEngine
from rlhf_mp.train.build import join_ranks
from rlhf_mp.train.nonfinite import Finding, Search

Engines = dict[str, TrainEngine]


@dataclass(frozen=True)
class Start:
    """The weights that a replay starts from."""

    folder: Path | None  # a checkpoint; None: the model that the run began with
    step: int  # so many are done in it
    before: list[int]  # steps to be made again before the one that is asked for
    skipped: int = 0  # steps between, whose batches are not there


@dataclass(frozen=True)
class Found:
    """Something that is no finite number, and where it is."""

    update: str
    dp_rank: int
    finding: Finding
    group: int
    reward: float
    tokens: list[tuple[int, int]]  # position and id


@dataclass(frozen=True)
class Outcome:
    """What a replay found; the same on every rank."""

    start: Start
    metrics: dict[str, float]  # of the step as it was made again
    logged: dict[str, float]  # the same ones of the run; empty where it ended before they were written
    found: list[Found]
    bad_weights: list[str]  # tensors that were no finite numbers before the step
    one_update_only: bool  # the optimizer started afresh: of several updates only the first could be the same


def choose_start(run_dir: Path, step: int, part: StepBatch, *, nearest: bool, say: Callable[[str], None]) -> Start:
    """The newest undamaged checkpoint from which kept batches lead to ``step``.

    Raises:
        CheckpointError: there is none.
    """
    kept = {*step_batch.kept_steps(run_dir)}
    options = [folder for folder in checkpoint.newest_first(run_dir) if checkpoint.step_of(folder) < step]
    same = checkpoint.folder_of(run_dir, step)
    if part.changed_nothing and same.is_dir():  # weights after the step are those before it
        options.insert(0, same)
    for folder in options:
        if damaged := list(checkpoint.damage(folder, checksums=True)):
            say(f"damaged checkpoint {folder.name} is not used: {'; '.join(damaged)}")
            continue
        done = min(checkpoint.step_of(folder), step - 1)
        return _start(folder, done, step, kept, nearest)
    return _start(None, 0, step, kept, nearest)


def _start(folder: Path | None, done: int, step: int, kept: set[int], nearest: bool) -> Start:
    between = [*range(done + 1, step)]
    missing = [s for s in between if s not in kept]
    if not missing:
        return Start(folder, done, between)
    if nearest:
        return Start(folder, done, [], len(between))
    raise CheckpointError(
        f"the newest weights before step {step} are of step {done}, and the batches of {len(missing)} of the steps "
        f"between are not there\n    fix: --nearest replays it on those weights, and its numbers will differ; "
        "trainer.save_batches=all keeps every batch of a run"
    )


def losses(config: RunConfig) -> tuple[dict[str, LossFn], dict[str, str]]:
    """Of each trained model: its loss, and what its metrics begin with."""
    if config.trainer.task != "rl":
        return {"actor": make_task(config).loss}, {"actor": "train/"}
    algorithm = make_algorithm(config)
    return {"actor": algorithm.policy_loss, "critic": algorithm.value_loss}, {"actor": "actor/", "critic": "critic/"}


def train(engines: Engines, parts: list[StepBatch], config: RunConfig) -> tuple[Sums, list[Found]]:
    """Collective. Every update of one step, as the loop makes them; this rank's metrics, and what is no number."""
    of_model, prefixes = losses(config)
    sums, found = [], []
    for name in parts[0].updates:
        engine = engines[name]
        part = step_batch.spread(parts, engine.layout.dp_rank, engine.layout.dp_size)
        for index, made in enumerate(part.updates[name]):
            search = Search(of_model[name], made.micro_batches, sequences_per_example(config.trainer.task))
            micro_batches = [part.batch.select(rows) for rows in made.micro_batches]
            metrics = engine.train_step(micro_batches, made.totals, search)
            sums.append({prefixes[name] + key: pair for key, pair in metrics.items()})
            if engine.layout.is_output_rank:
                found += [located(f"{name}, update {index + 1}", part, finding) for finding in search.found]
    return added(sums), found


def located(update: str, part: StepBatch, finding: Finding) -> Found:
    batch, row = part.batch, finding.row
    tokens = [(t, int(batch.tokens[row, t])) for t in finding.tokens]
    return Found(update, part.dp_rank, finding, int(batch.group_ids[row]), float(batch.rewards[row]), tokens)


def bad_weights(engines: Engines) -> list[str]:
    """Collective. Names of tensors with anything that is no finite number."""
    return [
        f"{model}: {name}"
        for model, engine in engines.items()
        for name, tensor in engine.weights()
        if not tensor.isfinite().all()
    ]


def replay(run: Replay, info: RankInfo, say: Callable[[str], None]) -> Outcome:
    """Collective. Make a step again.

    Raises:
        CheckpointError: its batch, or weights to start from, are not there.
    """
    parts = step_batch.read(step_batch.folder_of(run.run_dir, run.step))
    on_cpu = run.config.trainer.device == "cpu" or not torch.cuda.is_available()
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    device = torch.device("cpu" if on_cpu else f"cuda:{info.local_rank}")
    if not on_cpu:
        torch.cuda.set_device(device)
    for config in sorted((run.saved, run.config), key=lambda c: c.actor_rollout_ref.actor.strategy != "megatron"):
        if not dist.is_initialized():
            join_ranks(config, device)
    ranks = Ranks(info.rank, info.world_size)
    start = ranks.broadcast(
        choose_start(run.run_dir, run.step, parts[0], nearest=run.nearest, say=say) if info.rank == 0 else None
    )
    engines = prepared(run, start, parts[0].num_steps, device)
    if run.changes_backend:
        engines = moved(run, engines, parts[0].num_steps, ranks, device)
    spoiled = bad_weights(engines)
    sums, found = train(engines, parts, run.config)
    metrics = {name: total / count for name, (total, count) in sorted(reduce_over_ranks(sums).items()) if count}
    if run.changes_backend:  # its schedule starts afresh, like its optimizer
        metrics = {name: value for name, value in metrics.items() if not name.endswith("/lr")}
    return Outcome(
        start,
        metrics,
        logged_metrics(run.run_dir, run.step, metrics),
        [one for of_rank in ranks.gather(found) for one in of_rank],
        spoiled,
        run.changes_backend and max(len(made) for made in parts[0].updates.values()) > 1,
    )


def prepared(run: Replay, start: Start, num_steps: int, device: torch.device) -> Engines:
    """Collective. The run's own backend, with everything as it was before the step."""
    engines = make_trained(run.saved, device, num_steps)
    if start.folder is not None:
        for name, engine in engines.items():
            engine.load(start.folder / name)
    for step in start.before:
        train(engines, step_batch.read(step_batch.folder_of(run.run_dir, step)), run.saved)
    return engines


def moved(run: Replay, engines: Engines, num_steps: int, ranks: Ranks, device: torch.device) -> Engines:
    """Collective. The same weights on the other backend; its optimizer starts afresh."""
    folder = run.run_dir / f".replay_{run.step}"
    export_models(run.saved, ranks, engines, folder)
    engines.clear()
    gc.collect()
    run.config.actor_rollout_ref.model.path = str(folder)
    run.config.critic.model.path = str(folder.with_name(f"{folder.name}_critic"))
    made = make_trained(run.config, device, num_steps)
    ranks.barrier()
    if ranks.rank == 0:
        for used in (folder, folder.with_name(f"{folder.name}_critic")):
            shutil.rmtree(used, ignore_errors=True)
    return made


def logged_metrics(run_dir: Path, step: int, like: dict[str, float]) -> dict[str, float]:
    """What the run wrote of the step, of the metrics that a replay has."""
    file = run_dir / "metrics.jsonl"
    records = [record for record in read_jsonl(file) if record["step"] == step] if file.exists() else []
    return {name: record[name] for record in records if "time/step_s" in record for name in like if name in record}
