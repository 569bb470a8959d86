"""Everything that is not a rank: started by rank 0 through Ray, joined by the others, watched while the job runs."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_mp.cluster import bootstrap
from rlhf_mp.cluster.actors import DataFacts, EngineHost, SchedulerActor
from rlhf_mp.cluster.client import RolloutClient
from rlhf_mp.cluster.placement import Placement
from rlhf_mp.cluster.ranks import Ranks
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.rollout.sglang_server import Address

WATCH_S = 0.5  # how long a stop may have to wait for the watching thread

OnEnd = Callable[[str, str, Path], None]
"""(what ended, how, its log): called from a thread of its own."""


class Services:
    """The scheduler and the engines' hosts. Methods marked collective are called by all ranks."""

    def __init__(self, config: RunConfig, placement: Placement, ranks: Ranks, logs: Path, tmp: Path, on_end: OnEnd):
        """Collective. Engines are starting when it returns; ``addresses`` waits for them."""
        self.ranks = ranks
        self._hosts: list[Any] = []
        self._stopping = threading.Event()
        self.started = time.monotonic()
        token, address = ranks.broadcast(self._start_ray(tmp) if ranks.rank == 0 else None)
        if ranks.rank == 0:
            self._create(config, placement, logs, on_end)
        else:
            bootstrap.authenticate(token)
            bootstrap.join_ray(address)
        ranks.barrier()  # the scheduler has its name
        self.client = RolloutClient(bootstrap.find_actor(bootstrap.SCHEDULER), ranks.rank)

    @staticmethod
    def _start_ray(tmp: Path) -> tuple[str, str]:
        token = bootstrap.new_token()
        bootstrap.authenticate(token)
        return token, bootstrap.start_ray(tmp)

    def _create(self, config: RunConfig, placement: Placement, logs: Path, on_end: OnEnd) -> None:
        logs = logs.absolute()
        log_files = {"the rollout scheduler": logs / "scheduler.log"}
        scheduler = bootstrap.create_actor(
            SchedulerActor, config, log_files["the rollout scheduler"], name=bootstrap.SCHEDULER, max_concurrency=1000
        )
        watched = {"the rollout scheduler": scheduler.ended.remote()}
        for plan in placement.servers:
            name = f"SGLang engine {plan.index}"
            log_files[name] = logs / f"engine_{plan.index}.log"
            host = bootstrap.create_actor(
                EngineHost, plan, config, log_files[name], name=f"engine_{plan.index}", max_concurrency=8
            )
            watched[name] = host.ended.remote()
            self._hosts.append(host)

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
            found = [bootstrap.result(call) for call in [host.ready.remote() for host in self._hosts]]
            bootstrap.result(self.client.actor.connect.remote(found))
        return self.ranks.broadcast(found)

    def stop(self) -> None:
        """Collective. End everything; ranks leave before the cluster goes."""
        if self.ranks.rank != 0:
            bootstrap.stop_ray()
        self.ranks.barrier()
        if self.ranks.rank == 0:
            self._stopping.set()
            self._watch.join()  # a thread that used Ray after its shutdown would start a new cluster
            bootstrap.stop_ray()
