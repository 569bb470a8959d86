"""Which process runs where: a pure function of the config, computed alike everywhere."""

from dataclasses import dataclass

from rlhf_mp.config.schema import RunConfig
from rlhf_mp.rollout.sglang_server import ServerPlan


@dataclass(frozen=True)
class Placement:
    """Where the engines are. Rank r trains on GPU r mod n_gpus_per_node of its node."""

    num_ranks: int
    servers: tuple[ServerPlan, ...]


def place(config: RunConfig, on_cpu: bool) -> Placement:
    """Engines share the trainers' GPUs and are spread evenly over the machines; none spans two (checks.py).

    The k-th engine of a machine has its GPUs k * tp to (k + 1) * tp - 1.
    """
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    width = rollout.tensor_model_parallel_size
    nodes = [index * trainer.nnodes // rollout.num_engines for index in range(rollout.num_engines)]
    servers = []
    for index, node in enumerate(nodes):
        first = (index - nodes.index(node)) * width
        servers.append(
            ServerPlan(
                index=index,
                model_path=config.actor_rollout_ref.model.path,
                on_cpu=on_cpu,
                gpus=() if on_cpu else tuple(range(first, first + width)),
                seed=trainer.seed + index,
                node=node,
            )
        )
    return Placement(trainer.nnodes * trainer.n_gpus_per_node, tuple(servers))
