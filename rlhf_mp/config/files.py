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
    if world_size is not None and world_size != config.trainer.num_ranks:
        yield _wrong_rank_count(config, world_size)


def _wrong_rank_count(config: RunConfig, world_size: int) -> Problem:
    trainer = config.trainer
    planned = f"trainer.nnodes * trainer.n_gpus_per_node = {trainer.num_ranks}"
    launch = f"deepspeed --num_gpus {trainer.n_gpus_per_node} launch/train.py ..."
    if trainer.nnodes > 1:
        launch += f" on {trainer.nnodes} machines"
    per_node, rest = divmod(world_size, trainer.nnodes)
    override = f"trainer.n_gpus_per_node={per_node}"
    if rest:
        override = f"trainer.nnodes=1 trainer.n_gpus_per_node={world_size}"
    reason = f"the launcher started {world_size} rank(s), and {planned}"
    return Problem("trainer.n_gpus_per_node", trainer.n_gpus_per_node, reason, f"start it with {launch}, or {override}")
