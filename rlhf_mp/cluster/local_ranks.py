"""The ranks of a job on this host: each has a file in the job's folder in /tmp."""

import contextlib
import os
from pathlib import Path

from rlhf_mp.cluster.shared_memory import NOTED

RANKS = "ranks"


def register(job: str, name: str) -> Path:
    """Write the rank into the job's folder, which the first one makes; returns the folder.

    Args:
        name: number, pid and start time, with dots between.
    """
    tmp = Path(f"/tmp/rlhf_mp_{job}")
    for _ in range(100):
        # the guard of a rank that came and went before this one may be removing the folder
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            tmp.mkdir(mode=0o700, exist_ok=True)
            if tmp.stat().st_uid != os.getuid():
                raise PermissionError(f"{tmp} belongs to another user; fix: remove it, or choose another MASTER_PORT")
            for folder in (RANKS, NOTED):
                (tmp / folder).mkdir(exist_ok=True)
            (tmp / RANKS / name).touch()
            return tmp
    raise OSError(f"{tmp} could not be made, or was removed again and again; fix: remove what is there")


def local_ranks(tmp: Path) -> set[tuple[int, int, str]]:
    """(rank, pid, start time) of all that have registered; none once a guard has removed the folder."""
    names = (path.name.split(".") for path in (tmp / RANKS).glob("*"))
    return {(int(number), int(pid), started) for number, pid, started in names}
