"""Which process runs where: a pure function of the config and the machine, computed alike everywhere."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice

from rlhf_mp.config.schema import RunConfig
from rlhf_mp.errors import ConfigError, Problem
from rlhf_mp.rollout.sglang_server import Kind, ServerPlan

Cores = tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """Where the servers, or their parts, are. Rank r trains on GPU r mod n_gpus_per_node of its node."""

    num_ranks: int
    servers: tuple[ServerPlan, ...]
    rank_cores: tuple[Cores, ...] = ()  # of each rank; empty: wherever the system likes
    reward_servers: tuple[ServerPlan, ...] = ()

    def by_server(self) -> list[list[ServerPlan]]:
        """The parts of each server, the one that answers first."""
        plans = (*self.servers, *self.reward_servers)
        return [list(parts) for _, parts in groupby(plans, key=lambda plan: plan.name)]


@dataclass(frozen=True)
class Fleet:
    """Servers of one kind, all alike."""

    kind: Kind
    model_path: str
    number: int
    width: int  # GPUs, or workers, of each
    machines: range  # the job's that may have some
    span: int = 1  # machines of each

    @property
    def width_here(self) -> int:
        """GPUs, or workers, that a server has on each of its machines."""
        return self.width // self.span

    def parts(self) -> list[tuple[int, int, int]]:
        """(server, which part of it, machine): spread evenly over the machines, parts on neighbours."""
        rows = len(self.machines) // self.span  # of machines that a server may have
        firsts = [index * rows // self.number * self.span for index in range(self.number)]
        return [(index, part, self.machines[at + part]) for index, at in enumerate(firsts) for part in range(self.span)]


def place(config: RunConfig, on_cpu: bool, cores: Sequence[Cores] = ()) -> Placement:
    """Engines are spread evenly over the machines of the ranks, or those that are for engines alone; the servers of a
    reward model over those of the ranks.

    Colocated, the k-th server of its kind on a machine has its GPUs k * tp to (k + 1) * tp - 1, which ranks train on
    too. Disjoint, engines have as many GPUs after those of the ranks, and reward servers after those; on CPU every rank
    and every worker of a server has cores of its own. A server of several machines has equally many on each.

    Args:
        cores: of each machine, those that this job may use; only a disjoint placement on CPU asks.

    Raises:
        ConfigError: a machine has too few of them.
    """
    trainer, rollout, own = config.trainer, config.actor_rollout_ref.rollout, config.reward_model
    disjoint = trainer.placement == "disjoint"
    path, width = config.actor_rollout_ref.model.path, rollout.tensor_model_parallel_size
    with_ranks = range(trainer.nnodes)
    alone = range(trainer.nnodes, trainer.nnodes + rollout.nnodes)
    fleets = [Fleet("engine", path, rollout.num_engines, width, alone or with_ranks, config.machines_per_engine)]
    if own.served:
        knobs = own.rollout
        served = Fleet("reward_server", own.model.path, knobs.num_engines, knobs.tensor_model_parallel_size, with_ranks)
        fleets.append(served)
    rank_cores, fleet_cores = (), None
    if disjoint and on_cpu:
        ranks = [trainer.n_gpus_per_node] * trainer.nnodes + [0] * rollout.nnodes
        rank_cores, fleet_cores = _shared_out(ranks, fleets, cores)
    taken = [trainer.n_gpus_per_node if disjoint else 0] * trainer.nnodes + [0] * rollout.nnodes  # GPUs of each machine
    placed = []
    for fleet in fleets:
        here: Counter[int] = Counter()  # servers, or parts of one, that each machine has so far
        servers = []
        for index, part, node in fleet.parts():
            first = taken[node] + here[node] * fleet.width_here
            servers.append(
                ServerPlan(
                    index=index,
                    model_path=fleet.model_path,
                    on_cpu=on_cpu,
                    gpus=() if on_cpu else tuple(range(first, first + fleet.width_here)),
                    seed=trainer.seed + index,
                    node=node,
                    cores=fleet_cores[len(placed)][node][here[node]] if fleet_cores else (),
                    kind=fleet.kind,
                    part=part,
                    num_parts=fleet.span,
                )
            )
            here[node] += 1
        if disjoint:
            taken = [used + here[node] * fleet.width_here for node, used in enumerate(taken)]
        placed.append(tuple(servers))
    return Placement(trainer.num_ranks, placed[0], rank_cores, placed[1] if own.served else ())


def devices_per_node(config: RunConfig) -> int:
    """GPUs that ranks and servers have on the machine that needs most; on CPU, ranks and servers' workers."""
    placement = place(config, on_cpu=False)
    servers = (*placement.servers, *placement.reward_servers)
    return max(config.trainer.n_gpus_per_node, *(max(server.gpus) + 1 for server in servers))


def _shared_out(
    ranks_of: Sequence[int], fleets: Sequence[Fleet], machines: Sequence[Cores]
) -> tuple[tuple[Cores, ...], list[list[list[Cores]]]]:
    """Equally many for each of a machine's ranks and servers' workers, ranks first; what is left is nobody's.

    Returns:
        Of each rank; of each fleet, machine and server there.
    """
    of_ranks: list[Cores] = []
    of_fleets: list[list[list[Cores]]] = [[] for _ in fleets]
    for node, (ranks, cores) in enumerate(zip(ranks_of, machines, strict=True)):
        here = [sum(where == node for _, _, where in fleet.parts()) for fleet in fleets]
        workers = sum(number * fleet.width_here for number, fleet in zip(here, fleets, strict=True))
        each = len(cores) // (ranks + workers)
        if each == 0:
            reason = f"{ranks} rank(s) and {workers} server worker(s) of machine {node} on {len(cores)} core(s)"
            fix = (
                "fewer trainer.n_gpus_per_node or actor_rollout_ref.rollout.num_engines, or trainer.placement=colocated"
            )
            raise ConfigError(
                [Problem("trainer.placement", "disjoint", f"each needs a core of its own: {reason}", fix)]
            )
        left = iter(cores)
        of_ranks += [tuple(islice(left, each)) for _ in range(ranks)]
        for found, number, fleet in zip(of_fleets, here, fleets, strict=True):
            found.append([tuple(islice(left, each * fleet.width_here)) for _ in range(number)])
    return tuple(of_ranks), of_fleets


def on_host(plan: ServerPlan, visible: Sequence[str]) -> ServerPlan:
    """A plan counts a machine's GPUs from 0; this is the plan with those that the job was given there.

    Args:
        visible: CUDA_VISIBLE_DEVICES of the machine's ranks, which Slurm sets where jobs share a machine; empty: all.
            ``deepspeed --num_gpus n`` shows ranks the first n of a machine that the job has for itself: the GPUs of
            disjoint engines, which come after those, have their own numbers there.

    Raises:
        ConfigError: the job was given too few.
    """
    if not visible:
        return plan
    first_ones = list(visible) == [str(gpu) for gpu in range(len(visible))]
    if not first_ones and (missing := [gpu for gpu in plan.gpus if gpu >= len(visible)]):
        reason = f"{plan.name} has GPU {missing[0]} of the machine, counted from 0"
        servers = "num_engines x tensor_model_parallel_size GPUs (of rollout and of reward_model.rollout)"
        fix = f"ask for n_gpus_per_node + {servers}, or trainer.placement=colocated"
        shown = f"CUDA_VISIBLE_DEVICES={','.join(visible)}"
        raise ConfigError([Problem("trainer.placement", "disjoint", f"{reason}, and {shown}", fix)])
    return replace(plan, gpus=tuple(visible[gpu] if gpu < len(visible) else str(gpu) for gpu in plan.gpus))
