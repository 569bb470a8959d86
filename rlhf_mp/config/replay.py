"""Which step of which run is made again, and on what: the run's own config, and one for the other backend."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhf_mp.config.backend_checks import backend_problems
from rlhf_mp.config.backends import MegatronConfig, OffloadConfig
from rlhf_mp.config.load import load_config
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.config.yaml_file import read_override
from rlhf_mp.errors import ConfigError, Problem

CONFIG = "config.yaml"


@dataclass(frozen=True)
class Replay:
    """What ``replay`` needs to know."""

    run_dir: Path
    step: int
    saved: RunConfig  # on the run's own backend, for the ranks that there are now
    config: RunConfig  # what the step is made again on; the same one where that is the run's own backend
    nearest: bool  # older weights will do

    @property
    def changes_backend(self) -> bool:
        return self.config is not self.saved


def read_replay(
    run_dir: Path, step: int, strategy: str | None, overrides: Sequence[str], world_size: int, *, nearest: bool
) -> Replay:
    """
    Args:
        strategy: the backend to replay on; None: the run's own.
        overrides: knobs that are other than in the run, e.g. the layout of the other backend.

    Raises:
        ConfigError: the step's batch was not kept, or it cannot run so.
    """
    folder = run_dir / "batches" / f"step_{step:06d}"
    if not (folder / CONFIG).is_file():
        kept = sorted(int(place.name.removeprefix("step_")) for place in (run_dir / "batches").glob("step_*"))
        reason = f"its batch was not kept; those of {_shown(kept)} were"
        raise ConfigError([Problem("--step", step, reason, "trainer.save_batches=all keeps every batch of a run")])
    saved = load_config(folder / CONFIG)
    own = saved.actor_rollout_ref.actor.strategy
    same_ranks = saved.trainer.num_ranks == world_size
    saved.trainer.nnodes, saved.trainer.n_gpus_per_node = 1, world_size
    if strategy in (None, own):
        changed = _with(saved, overrides)
        _require(changed)
        return Replay(run_dir, step, changed, changed, nearest)
    if any(trained.model.lora_rank for trained in saved.trained):
        reason = "another backend would get the merged weights and an adapter of its own, which has other gradients"
        raise ConfigError([Problem("--strategy", strategy, reason, f"--strategy {own}")])
    if not same_ranks:  # the layout of other ranks: each has the whole model
        for trained in saved.trained:
            trained.updates.megatron = MegatronConfig(sequence_parallel=False)
    config = copy.deepcopy(saved)
    for trained in config.trained:
        trained.updates.strategy = strategy
        if strategy != "deepspeed":
            trained.updates.fsdp_config = OffloadConfig()
        trained.updates.megatron = MegatronConfig(sequence_parallel=False)
    config = _with(config, overrides)
    _require(config)
    return Replay(run_dir, step, saved, config, nearest)


def _shown(steps: list[int]) -> str:
    return f"steps {', '.join(map(str, steps))}" if steps else "no step"


def _with(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    node = OmegaConf.structured(config)
    for text in overrides:
        key, value = read_override(text)
        try:
            OmegaConf.update(node, key, value, merge=False)
        except OmegaConfBaseException as error:
            raise ConfigError(
                [Problem(key, value, str(error).splitlines()[0], "docs/config.md lists the knobs")]
            ) from error
    return OmegaConf.to_object(node)


def _require(config: RunConfig) -> None:
    if problems := list(backend_problems(config)):
        raise ConfigError(problems)
