"""The parts of one rank of a task that learns from examples: no engines that sample, no scheduler, no weight swap."""

import torch

from rlhf_mp.algorithms.supervised import make_task
from rlhf_mp.assemble import (
    Job,
    make_checkpoints,
    make_observers,
    make_sinks,
    make_trained,
    make_updates,
    watched,
)
from rlhf_mp.cluster.scheduler import cuts
from rlhf_mp.data.batches import Batches
from rlhf_mp.data.examples import ExampleReader, ExampleSet
from rlhf_mp.data.order import make_order
from rlhf_mp.models.hf import load_tokenizer, stop_token_ids
from rlhf_mp.observe.metrics import MetricLog
from rlhf_mp.observe.reduce import reduce_over_ranks
from rlhf_mp.planner.term import Role
from rlhf_mp.train.build import make_reference
from rlhf_mp.trainer.best import Best
from rlhf_mp.trainer.loop import Schedule
from rlhf_mp.trainer.supervised import SupervisedTrainer


def make_supervised_trainer(job: Job) -> SupervisedTrainer:
    """All parts of this rank, resumed where the newest checkpoint stands. Collective."""
    config, knobs, data = job.config, job.config.trainer, job.config.data
    train, validation = read_examples(job)  # before the model: bad rows are told at once
    torch.manual_seed(knobs.seed + job.ranks.rank)
    order = make_order(train.sizes, None, data)
    num_steps = knobs.total_training_steps or knobs.total_epochs * order.batches_per_epoch
    task, engine = make_task(config), make_trained(config, job.device, num_steps)["actor"]
    reference = make_reference(config, job.device, engine) if task.needs_reference else None
    models = {Role.actor: engine} | ({Role.reference: reference} if reference else {})
    around, metrics = make_observers(job, models)
    batches = Batches(train.examples, order, cuts(config), engine.layout.dp_rank, engine.layout.dp_size)
    trainer = SupervisedTrainer(
        schedule=Schedule(num_steps, knobs.test_freq, knobs.save_freq, knobs.val_before_train),
        task=task,
        actor=engine,
        reference=reference,
        batches=batches,
        validation=batches.share(validation.examples) if validation.examples else None,
        checkpoints=make_checkpoints(job, {"actor": engine}),
        log=MetricLog([], reduce_over_ranks),
        watch=lambda phase: watched(job, phase, around),
        bounded=job.watched,
        span=job.timeline.span,
        memory=metrics,
        packed=config.actor_rollout_ref.model.use_remove_padding,
        counts=engine.layout.is_output_rank,
        stop_requested=job.stop_request.made,
        best=Best(knobs.best_metric, knobs.best_mode, stop_at=knobs.stop_at) if knobs.best_metric else None,
        updates=make_updates(job, engine),
    )
    trainer.resume()
    if job.ranks.rank == 0:
        print(
            f"{len(train.examples)} examples ({train.num_dropped} dropped as longer than data.max_length), "
            f"{len(validation.examples)} for validation, {num_steps} steps"
        )
        trainer.log.sinks = make_sinks(job, num_steps, trainer.step)
    return trainer


def read_examples(job: Job) -> tuple[ExampleSet, ExampleSet]:
    """For training and for validation.

    Raises:
        ConfigError: with every bad row.
    """
    model, data = job.config.actor_rollout_ref.model, job.config.data
    tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    stop_ids = stop_token_ids(model.path, tokenizer, trust_remote_code=model.trust_remote_code)
    reader = ExampleReader(job.config.trainer.task, tokenizer, stop_ids, data)
    validation = reader.read(data.val_files, data.val_max_samples) if data.val_files else ExampleSet([], [])
    return reader.read(data.train_files, data.train_max_samples), validation
