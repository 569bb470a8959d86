"""Machines of a job that have engines and no ranks.

The same command starts as many processes there as elsewhere. The first of a machine stays and is its keeper: it brings
the machine into Ray, and takes it out when the job is over. Keepers and rank 0 meet at the store that the ranks met at.
Whoever reaches that store can read it, so Ray's token is handed over in a file for its owner alone.
"""

import json
import os
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlhf_mp.cluster import bootstrap
from rlhf_mp.cluster.launcher import RankInfo, visible_gpus
from rlhf_mp.cluster.ranks import not_shared
from rlhf_mp.config.allocation import KEY
from rlhf_mp.errors import ConfigError, Problem

MEET_S, LEAVE_S, LOOK_S = 300, 30, 1.0


@dataclass(frozen=True)
class Machine:
    """What its keeper tells rank 0."""

    name: str
    address: str  # for the other machines
    visible_gpus: list[str]  # empty: all of them
    cores: list[int]  # that the job may use
    sees_run_dir: bool


def open_store(info: RankInfo) -> dist.Store:
    """Rank 0's and the keepers', where the ranks' process group has its own: in rank 0's process, or torchrun's."""
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=info.rank == 0 and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ,
        timeout=timedelta(seconds=MEET_S),
        wait_for_workers=False,
        multi_tenant=True,  # one listener for all stores of rank 0
    )
    return dist.PrefixStore("rlhf_mp/engine_machines", store)


class EngineMachines:
    """As rank 0 sees them."""

    def __init__(self, info: RankInfo, run_dir: Path):
        """Wait for every keeper.

        Raises:
            ConfigError: one did not come, or does not see the run directory.
        """
        self._store, self._number, self._run_dir = open_store(info), info.engine_machines, run_dir
        proof = run_dir / ".seen_by_engine_machines"
        proof.touch()
        self._store.set("proof", str(proof))
        self.machines = [Machine(**self._answer(f"here/{index}")) for index in range(self._number)]
        proof.unlink()
        if blind := [machine.name for machine in self.machines if not machine.sees_run_dir]:
            raise not_shared(run_dir, blind)

    def invite(self, token: str, address: str) -> None:
        """Let them join Ray at ``address``; returns once all have.

        Raises:
            ConfigError: one could not.
        """
        handed_over = self._run_dir / ".ray_token"
        handed_over.unlink(missing_ok=True)  # of a run that was killed just then
        try:
            with open(os.open(handed_over, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(token)
            self._store.set("ray", json.dumps([str(handed_over), address]))
            for index in range(self._number):
                self._answer(f"joined/{index}")
        finally:
            handed_over.unlink(missing_ok=True)

    def dismiss(self) -> None:
        """The job is over: wait until they have left, as what they meet at ends with this process."""
        self._store.set("over", "")
        with suppress(dist.DistStoreError):  # one hangs; its guard, or Slurm, sees to it
            self._store.wait([f"left/{index}" for index in range(self._number)], timedelta(seconds=LEAVE_S))

    def _answer(self, key: str) -> Any:
        try:
            return json.loads(self._store.get(key))
        except dist.DistStoreError as error:
            index = int(key.rpartition("/")[2])
            reason = f"machine {index} of them did not come within {MEET_S} s; its output says why"
            fix = f"start the same command there, or {KEY}={self._number - 1}"
            raise ConfigError([Problem(KEY, self._number, reason, fix)]) from error


def keep_machine(info: RankInfo, address: str, tmp: Path, run_dir: Path) -> None:
    """What the first process of such a machine does, from its start to the end of the job.

    Args:
        address: of this machine, for the others.
        tmp: private to the job on this machine.

    Raises:
        RuntimeError: Ray did not start, or ended here; or rank 0 has gone.
    """
    index = (info.rank - info.world_size) // info.local_world_size
    store = open_store(info)
    sees = Path(store.get("proof").decode()).exists()
    cores = sorted(os.sched_getaffinity(0))
    machine = Machine(socket.gethostname(), address, visible_gpus(), cores, sees)
    store.set(f"here/{index}", json.dumps(asdict(machine)))
    token, head = json.loads(store.get("ray"))
    bootstrap.authenticate(Path(token).read_text())
    node = bootstrap.start_node(head, tmp, address, run_dir / "logs" / f"ray_{address}.log")
    store.set(f"joined/{index}", json.dumps(True))
    print(f"{machine.name} has joined with its engines", flush=True)
    _until_over(store, node)
    bootstrap.stop_node(node)
    store.set(f"left/{index}", "")


def _until_over(store: dist.Store, node: subprocess.Popen) -> None:
    while not _is_over(store):
        if node.poll() is not None:
            raise RuntimeError(f"Ray on this machine ended with exit code {node.returncode}")
        time.sleep(LOOK_S)


def _is_over(store: dist.Store) -> bool:
    try:
        return store.check(["over"])
    except dist.DistNetworkError:
        raise RuntimeError("rank 0 has gone") from None
