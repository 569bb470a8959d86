"""What a run needs from this machine: the files its config names and the ranks its launcher started."""

from collections.abc import Iterator

from rlhf_mp.config.checkpoint_folder import checkpoint_problems
from rlhf_mp.config.data_files import data_problems
from rlhf_mp.config.lora_checks import target_problems
from rlhf_mp.config.model_folder import critic_problems, model_problems
from rlhf_mp.config.reward_model_folder import reward_model_problems
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.errors import Problem
from rlhf_mp.host_allocator import allocator_problems


def file_problems(config: RunConfig, world_size: int | None) -> Iterator[Problem]:
    """Everything wrong outside the config.

    Args:
        world_size: ranks that the launcher started; None where nothing was launched (``--check``).
    """
    yield from model_problems(config)
    yield from critic_problems(config)
    yield from reward_model_problems(config)
    yield from target_problems(config)
    yield from data_problems(config)
    yield from checkpoint_problems(config)
    yield from allocator_problems(config)
    if world_size is not None and world_size != launched_processes(config):
        yield _wrong_rank_count(config, world_size)


def launched_processes(config: RunConfig) -> int:
    """How many a launcher starts: on every machine as many, those that have engines and no ranks included."""
    return config.trainer.num_ranks + config.engine_machines * config.trainer.n_gpus_per_node


def _wrong_rank_count(config: RunConfig, world_size: int) -> Problem:
    trainer = config.trainer
    machines, named = trainer.nnodes, "trainer.nnodes"
    if config.engine_machines:
        machines += config.engine_machines
        named = "(trainer.nnodes + actor_rollout_ref.rollout.nnodes)"
    planned = f"{named} * trainer.n_gpus_per_node = {launched_processes(config)}"
    launch = f"deepspeed --num_gpus {trainer.n_gpus_per_node} launch/train.py ..."
    if machines > 1:
        launch += f" on {machines} machines"
    per_node, rest = divmod(world_size, machines)
    override = f"trainer.n_gpus_per_node={per_node}"
    if rest or not per_node:
        alone = " actor_rollout_ref.rollout.nnodes=0" if config.engine_machines else ""
        override = f"trainer.nnodes=1 trainer.n_gpus_per_node={world_size}{alone}"
    reason = f"the launcher started {world_size} rank(s), and {planned}"
    return Problem("trainer.n_gpus_per_node", trainer.n_gpus_per_node, reason, f"start it with {launch}, or {override}")
