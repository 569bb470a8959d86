"""Everything that is not a rank: started by rank 0 through Ray, joined by the others, watched while the job runs.

On several hosts rank 0 starts Ray's head and the first rank of every other host adds its host; a host without ranks has
a keeper for that (engine_machines.py). So Ray lives and dies with them as on one host. Ranks hear its token and address
over their own network.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_mp.cluster import bootstrap
from rlhf_mp.cluster.actors import DataFacts, SchedulerActor
from rlhf_mp.cluster.client import RolloutClient
from rlhf_mp.cluster.engine_host import EngineHost, EnginePart, engine_log
from rlhf_mp.cluster.engine_machines import EngineMachines
from rlhf_mp.cluster.engine_pool import News
from rlhf_mp.cluster.launcher import RankInfo, visible_gpus
from rlhf_mp.cluster.placement import Placement, on_host
from rlhf_mp.cluster.ranks import Ranks
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.rollout.sglang_server import Address, Kind, ServerPlan

WATCH_S = 0.5  # how long a stop may have to wait for the watching thread
SCHEDULER = "the rollout scheduler"

OnEnd = Callable[[str, str, Path], None]
"""(what ended, how, its log): called from a thread of its own."""


@dataclass(frozen=True)
class Here:
    """Where this rank is."""

    info: RankInfo
    address: str  # of this host, for the others
    tmp: Path  # private to the job on this host
    engine_machines: EngineMachines | None = None  # for rank 0, where there are some


@dataclass(frozen=True)
class Host:
    """A machine of the job."""

    node_id: str  # Ray's
    address: str
    visible_gpus: list[str]  # empty: all of them


class Services:
    """The scheduler and the engines' hosts. Methods marked collective are called by all ranks."""

    def __init__(self, config: RunConfig, placement: Placement, ranks: Ranks, here: Here, logs: Path, on_end: OnEnd):
        """Collective. Engines are starting when it returns; ``addresses`` waits for them."""
        self.ranks = ranks
        self._owners: dict[Kind, dict[str, Any]] = {}  # actors, by the names of their servers
        self._engine_machines = here.engine_machines
        self._node: Any = None  # Ray on this host, where it is a process of its own
        self._stopping = threading.Event()
        self.started = time.monotonic()
        self._logs = logs = logs.absolute()
        self._join_ray(here, logs)
        nodes = ranks.gather((bootstrap.node_id(), here.address, visible_gpus()))
        self.hosts = [Host(*node) for node in nodes[:: config.trainer.n_gpus_per_node]]
        if self._engine_machines:
            machines = self._engine_machines.machines
            names = bootstrap.node_ids([machine.address for machine in machines])
            self.hosts += [Host(name, m.address, m.visible_gpus) for name, m in zip(names, machines, strict=True)]
        if ranks.rank == 0:
            self._create(config, placement, on_end)
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
            if self._engine_machines:
                self._engine_machines.invite(*started)
        token, address = self.ranks.broadcast(started)
        if self.ranks.rank == 0:
            return
        bootstrap.authenticate(token)
        if here.info.local_rank == 0:  # the first rank of another host
            self._node = bootstrap.start_node(address, here.tmp, here.address, logs / f"ray_{here.address}.log")
        bootstrap.join_ray(address, visible)

    def _create(self, config: RunConfig, placement: Placement, on_end: OnEnd) -> None:
        scheduler_log = self._logs / "scheduler.log"
        scheduler = bootstrap.create_actor(
            SchedulerActor, config, scheduler_log,
            name=bootstrap.SCHEDULER, max_concurrency=1000, node=self.hosts[0].node_id,
        )  # fmt: skip
        self._watched = {SCHEDULER: scheduler.news.remote()}
        log_files = {SCHEDULER: scheduler_log}
        for plans in placement.by_server():
            first, *others = plans
            parts = [self._own(EnginePart, plan, config) for plan in others]
            owner = self._own(EngineHost, first, config, parts)
            self._owners.setdefault(first.kind, {})[first.name] = owner
            self._watched[first.name] = owner.ended.remote()
            log_files[first.name] = engine_log(self._logs, first.index, 0, first.kind)

        def watch() -> None:
            while not self._stopping.is_set():
                end = bootstrap.first_end(dict(self._watched), WATCH_S)
                if end is None:
                    continue
                name, said = end
                if not isinstance(said, News):  # how it died
                    on_end(name, said, log_files[name])
                    return
                if said.fatal:
                    on_end(said.name, said.text, engine_log(self._logs, said.index, said.start, said.kind))
                    return
                self._watched[SCHEDULER] = scheduler.news.remote()
                self._tell(said)

        self._watch = threading.Thread(target=watch, name="services watch", daemon=True)
        self._watch.start()

    def _own(self, kind: type, plan: ServerPlan, config: RunConfig, *more: Any) -> Any:
        """An actor on the plan's machine."""
        host = self.hosts[plan.node]
        return bootstrap.create_actor(
            kind, on_host(plan, host.visible_gpus), config, self._logs, host.address, *more,
            name=f"{plan.kind}_{plan.index}" + f"_part_{plan.part}" * (plan.part > 0),
            max_concurrency=8, node=host.node_id,
        )  # fmt: skip

    def _tell(self, news: News) -> None:
        print(f"{news.name}: {news.text}", flush=True)
        if news.restarting:
            starts = (news.start, news.start + 1)
            before, after = (engine_log(self._logs, news.index, start, news.kind) for start in starts)
            print(f"    what it wrote before: {before}\n    what it writes now: {after}", flush=True)

    def facts(self) -> DataFacts:
        """Collective. What the scheduler found in the data files."""
        return self.ranks.broadcast(self.client.facts() if self.ranks.rank == 0 else None)

    def addresses(self) -> list[Address]:
        """Collective. Where the engines answer, once all servers do; the scheduler knows them from then on."""
        found = {}
        for kind, owners in self._owners.items():  # of rank 0; the others have none
            found[kind] = [bootstrap.result(call) for call in [owner.ready.remote() for owner in owners.values()]]
            bootstrap.result(self.client.actor.connect.remote(kind, [*owners.values()], found[kind]))
            for name in owners:  # from here on the scheduler's pool sees to their ends
                del self._watched[name]
        return self.ranks.broadcast(found.get("engine"))

    def stop(self) -> None:
        """Collective. End everything; ranks leave before the cluster goes."""
        if self.ranks.rank == 0:
            self._stopping.set()
            self._watch.join()  # a thread that used Ray after its shutdown would start a new cluster
            if self._engine_machines:
                self._engine_machines.dismiss()
        else:
            bootstrap.stop_ray()
        self.ranks.barrier()
        if self._node is not None:
            bootstrap.stop_node(self._node)
        if self.ranks.rank == 0:
            bootstrap.stop_ray()
