"""Everything that is not a rank: started by rank 0 through Ray, joined by the others, watched while the job runs.

On several hosts rank 0 starts Ray's head and the first rank of every other host adds its host. So Ray lives and dies
with the ranks there as on one host; its token and address travel over the ranks' own network, and no file holds them.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_mp.cluster import bootstrap
from rlhf_mp.cluster.actors import DataFacts, EngineHost, SchedulerActor
from rlhf_mp.cluster.client import RolloutClient
from rlhf_mp.cluster.launcher import RankInfo
from rlhf_mp.cluster.placement import Placement
from rlhf_mp.cluster.ranks import Ranks
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.rollout.sglang_server import Address

WATCH_S = 0.5  # how long a stop may have to wait for the watching thread

OnEnd = Callable[[str, str, Path], None]
"""(what ended, how, its log): called from a thread of its own."""


@dataclass(frozen=True)
class Here:
    """Where this rank is."""

    info: RankInfo
    address: str  # of this host, for the others
    tmp: Path  # private to the job on this host


@dataclass(frozen=True)
class Host:
    """A machine of the job."""

    node_id: str  # Ray's
    address: str


class Services:
    """The scheduler and the engines' hosts. Methods marked collective are called by all ranks."""

    def __init__(self, config: RunConfig, placement: Placement, ranks: Ranks, here: Here, logs: Path, on_end: OnEnd):
        """Collective. Engines are starting when it returns; ``addresses`` waits for them."""
        self.ranks = ranks
        self._engine_hosts: list[Any] = []
        self._node: Any = None  # Ray on this host, where it is a process of its own
        self._stopping = threading.Event()
        self.started = time.monotonic()
        logs = logs.absolute()
        self._join_ray(here, logs)
        nodes = ranks.gather((bootstrap.node_id(), here.address))
        self.hosts = [Host(*node) for node in nodes[:: config.trainer.n_gpus_per_node]]
        if ranks.rank == 0:
            self._create(config, placement, logs, on_end)
        ranks.barrier()  # the scheduler has its name
        self.client = RolloutClient(bootstrap.find_actor(bootstrap.SCHEDULER), ranks.rank)

    def _join_ray(self, here: Here, logs: Path) -> None:
        """Collective."""
        visible = here.address if here.info.several_hosts else None
        started = None
        if self.ranks.rank == 0:
            token = bootstrap.new_token()
            bootstrap.authenticate(token)
            started = token, bootstrap.start_ray(here.tmp, visible)
        token, address = self.ranks.broadcast(started)
        if self.ranks.rank == 0:
            return
        bootstrap.authenticate(token)
        if here.info.local_rank == 0:  # the first rank of another host
            self._node = bootstrap.start_node(address, here.tmp, here.address, logs / f"ray_{here.address}.log")
        bootstrap.join_ray(address, visible)

    def _create(self, config: RunConfig, placement: Placement, logs: Path, on_end: OnEnd) -> None:
        log_files = {"the rollout scheduler": logs / "scheduler.log"}
        scheduler = bootstrap.create_actor(
            SchedulerActor, config, log_files["the rollout scheduler"],
            name=bootstrap.SCHEDULER, max_concurrency=1000, node=self.hosts[0].node_id,
        )  # fmt: skip
        watched = {"the rollout scheduler": scheduler.ended.remote()}
        for plan in placement.servers:
            name = f"SGLang engine {plan.index}"
            log_files[name] = logs / f"engine_{plan.index}.log"
            host = self.hosts[plan.node]
            engine = bootstrap.create_actor(
                EngineHost, plan, config, log_files[name], host.address,
                name=f"engine_{plan.index}", max_concurrency=8, node=host.node_id,
            )  # fmt: skip
            watched[name] = engine.ended.remote()
            self._engine_hosts.append(engine)

        def watch() -> None:
            while not self._stopping.is_set():
                if end := bootstrap.first_end(watched, WATCH_S):
                    name, how = end
                    on_end(name, how, log_files[name])
                    return

        self._watch = threading.Thread(target=watch, name="services watch", daemon=True)
        self._watch.start()

    def facts(self) -> DataFacts:
        """Collective. What the scheduler found in the data files."""
        return self.ranks.broadcast(self.client.facts() if self.ranks.rank == 0 else None)

    def addresses(self) -> list[Address]:
        """Collective. Where the engines answer, once they all do; the scheduler knows it from then on."""
        found = None
        if self.ranks.rank == 0:
            found = [bootstrap.result(call) for call in [host.ready.remote() for host in self._engine_hosts]]
            bootstrap.result(self.client.actor.connect.remote(found))
        return self.ranks.broadcast(found)

    def stop(self) -> None:
        """Collective. End everything; ranks leave before the cluster goes."""
        if self.ranks.rank == 0:
            self._stopping.set()
            self._watch.join()  # a thread that used Ray after its shutdown would start a new cluster
        else:
            bootstrap.stop_ray()
        self.ranks.barrier()
        if self._node is not None:
            bootstrap.stop_node(self._node)
        if self.ranks.rank == 0:
            bootstrap.stop_ray()
