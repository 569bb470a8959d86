"""Which rank is this process? One answer for deepspeed, torchrun, srun and plain python.

Imports nothing heavy: the answer is needed before torch or DeepSpeed look at the environment.
"""

import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rlhf_mp.errors import ConfigError, Problem

COMPILED = Path(sys.prefix) / "torch_extensions"
"""DeepSpeed's operators as ``make setup`` compiled them: with this environment's paths, which are part of the flags."""


@dataclass(frozen=True)
class RankInfo:
    """One of the processes that were launched. The ranks, which train, are the first ``world_size`` of them."""

    rank: int
    local_rank: int  # on its machine; also the index of its GPU
    world_size: int
    local_world_size: int
    engine_machines: int = 0  # after those of the ranks: their processes do not train

    @property
    def several_hosts(self) -> bool:
        return self.engine_machines > 0 or self.local_world_size < self.world_size

    @property
    def trains(self) -> bool:
        return self.rank < self.world_size


def read_rank(environ: Mapping[str, str]) -> RankInfo:
    """What the launcher's variables say; without any, a single process.

    Raises:
        ConfigError: RANK without its companions, so part of a launcher's environment is missing.
    """
    if "RANK" in environ:
        local_size = "LOCAL_SIZE" if "LOCAL_SIZE" in environ else "LOCAL_WORLD_SIZE"  # deepspeed's, torchrun's
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", local_size)
        missing = [name for name in names if name not in environ]
        if missing:
            raise ConfigError([_missing(name, "RANK is set, so a launcher must have set this too") for name in missing])
        return RankInfo(*(int(environ[name]) for name in names))
    if "SLURM_STEP_NUM_TASKS" in environ:  # set by srun alone: an sbatch script itself is one process
        return RankInfo(
            rank=int(environ["SLURM_PROCID"]),
            local_rank=int(environ["SLURM_LOCALID"]),
            world_size=int(environ["SLURM_STEP_NUM_TASKS"]),
            local_world_size=tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])[int(environ["SLURM_NODEID"])],
        )
    return RankInfo(rank=0, local_rank=0, world_size=1, local_world_size=1)


def rank_environment() -> RankInfo:
    """``read_rank`` of this process; completes ``os.environ`` to what torch.distributed and DeepSpeed read.

    Raises:
        ConfigError: as ``read_rank``, or several ranks without an address to meet at.
    """
    info = read_rank(os.environ)
    found = {
        "RANK": info.rank,
        "LOCAL_RANK": info.local_rank,
        "WORLD_SIZE": info.world_size,
        "LOCAL_WORLD_SIZE": info.local_world_size,
        # unset, every rank would start a thread per core
        "OMP_NUM_THREADS": max(1, len(os.sched_getaffinity(0)) // info.local_world_size),
    }
    use_own_compiler_cache()
    if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        found["MASTER_ADDR"], found["MASTER_PORT"] = _meeting_point(info, os.environ)
    for name, value in found.items():
        os.environ.setdefault(name, str(value))
    return info


def leave_out(info: RankInfo, engine_machines: int) -> RankInfo:
    """The last machines have engines and no ranks: what torch.distributed shall see, here and in ``os.environ``."""
    if not engine_machines:
        return info
    world_size = info.world_size - engine_machines * info.local_world_size
    os.environ["WORLD_SIZE"] = str(world_size)
    return replace(info, world_size=world_size, engine_machines=engine_machines)


def visible_gpus() -> list[str]:
    """Names of those that this process was given; empty: all of its machine."""
    return [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]


def use_own_compiler_cache() -> None:
    """Let DeepSpeed find the operators that ``make setup`` compiled, and check them with the ninja that built them.

    Ninja versions hash commands differently: with another one, a minute of compiling starts over at every change.
    """
    own = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", os.defpath)
    if path.split(os.pathsep)[0] != own:
        os.environ["PATH"] = own + os.pathsep + path
    if COMPILED.is_dir():
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(COMPILED))


def check_meeting_point(info: RankInfo) -> None:
    """Rank 0 will listen at MASTER_PORT; say so now if it can't. torchrun listens there itself.

    Raises:
        ConfigError: another process has the port, most likely another job on this machine.
    """
    if info.rank != 0 or "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
        return
    port = int(os.environ["MASTER_PORT"])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            reason = "another process listens there, most likely another job"
            fix = f"deepspeed --master_port {port + 1} ..., under srun MASTER_PORT={port + 1} (or end that job)"
            raise ConfigError([Problem("MASTER_PORT", port, reason, fix)]) from None


def _meeting_point(info: RankInfo, environ: Mapping[str, str]) -> tuple[str, int]:
    """An address and port that every rank works out alike."""
    if info.world_size == 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return "127.0.0.1", free.getsockname()[1]
    if "SLURM_STEP_NODELIST" in environ:
        return first_host(environ["SLURM_STEP_NODELIST"]), 10_000 + int(environ["SLURM_JOB_ID"]) % 10_000
    raise ConfigError([_missing("MASTER_ADDR and MASTER_PORT", f"{info.world_size} ranks have no address to meet at")])


def tasks_per_node(text: str) -> list[int]:
    """Slurm's run lengths: ``2(x3),1`` is [2, 2, 2, 1]."""
    counts = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(repeat or 1)
    return counts


def first_host(nodelist: str) -> str:
    """The first of Slurm's compressed list: ``gpu[03-05,9],cpu1`` starts with gpu03."""
    prefix, first, suffix = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodelist).groups(default="")
    return prefix + first + suffix


def _missing(name: str, reason: str) -> Problem:
    return Problem(name, None, reason, "start with deepspeed, torchrun or srun, or unset RANK for a single process")
