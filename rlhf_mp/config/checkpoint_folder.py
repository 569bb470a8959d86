"""Can the run continue from the checkpoint it would choose? Looks at names and sizes, reads no weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_mp import checkpoint
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.errors import CheckpointError, Problem

NEW_RUN = (
    "trainer.experiment_name=<new name> (trainer.default_local_dir=<new folder> where that is set) starts a new run, "
    "trainer.resume_mode=disable starts over in the same folder"
)


def checkpoint_problems(config: RunConfig) -> Iterator[Problem]:
    """What keeps the run from resuming as ``trainer.resume_mode`` says."""
    trainer, model = config.trainer, Path(config.actor_rollout_ref.model.path)
    if trainer.resume_mode == "disable":
        return
    candidates = checkpoint.newest_first(Path(trainer.default_local_dir))
    key, found, fix = "trainer.resume_mode", trainer.resume_mode, NEW_RUN
    if trainer.resume_mode == "resume_path":
        if trainer.resume_from_path is None:  # checks.py says so
            return
        candidates = [Path(trainer.resume_from_path)]
        key, found, fix = "trainer.resume_from_path", trainer.resume_from_path, "name another global_step_* folder"
        if not candidates[0].is_dir():
            yield Problem(key, found, "there is no such folder", fix)
            return
    try:
        identity, facts = checkpoint.model_identity(model), trained_facts(config)
    except (OSError, ValueError):  # model_folder.py says so
        return
    damaged = []
    for folder in candidates:
        try:
            state = checkpoint.read_state(folder, checksums=False)
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        for reason in checkpoint.misfits(state, identity, trainer.num_ranks, facts):
            yield Problem(key, found, f"{folder} {reason}", fix)
        return
    if damaged:
        yield Problem(key, found, f"no undamaged checkpoint: {'; '.join(damaged)}", fix)


def trained_facts(config: RunConfig) -> dict[str, Any]:
    """What a checkpoint of this run can be continued with: the task, each model's backend, the critic's shapes.

    With LoRA a checkpoint holds the adapter alone: its shape is part of this, and the base that it belongs to.

    Raises:
        OSError, ValueError: the critic's config.json cannot be read.
    """
    facts: dict[str, Any] = {f"{trained.key}.strategy": trained.updates.strategy for trained in config.trained}
    for trained in config.trained:
        if trained.updates.optim.optimizer != "adamw":  # what was AdamW's has no name in older checkpoints
            facts[f"{trained.key}.optim.optimizer"] = trained.updates.optim.optimizer
    facts["trainer.task"] = config.trainer.task
    if config.critic.enable:
        facts["critic.model"] = checkpoint.model_identity(Path(config.critic.model.path))
    for trained in config.trained:
        if trained.model.lora_rank:
            names = ("lora_rank", "lora_alpha", "target_modules", "quantization")
            facts |= {f"{trained.model_key}.{name}": getattr(trained.model, name) for name in names}
            facts[f"the weights at {trained.model_key}.path"] = checkpoint.weights_mark(Path(trained.model.path))
    return facts
