"""Files in /dev/shm outlive killed processes. Which are a job's, told by who maps them or by their names."""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
NOTED = "shared_memory"
UNTIDY = re.compile(r"(sem\.mp-|psm_|sgl_shm_|sglang_)")
"""Left behind by multiprocessing and SGLang. Their names don't tell whose they are. Others may map shared memory of
the system (CUDA, NCCL): it stays."""


def untidy_files(pids: Iterable[int]) -> set[str]:
    """Names of such files that these processes map now."""
    maps = "".join(map(_maps, pids))
    return {name for name in re.findall(rf" {SHARED_MEMORY}/(\S+)$", maps, re.MULTILINE) if UNTIDY.match(name)}


def note_files(tmp: Path, pids: Iterable[int]) -> None:
    """Where every guard of this host finds what these processes map: as file names in the job's folder."""
    with suppress(FileNotFoundError):  # a guard has cleaned up already
        for name in untidy_files(pids):
            (tmp / NOTED / name).touch()


def _maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def allreduce_buffers() -> str:
    """How the names of the files begin through which DeepSpeed's ranks on one CPU machine reduce: 66 MiB a rank."""
    return f"deepspeed_allreduce_buffer_{os.getuid()}_{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}_"


def remove_files(names: set[str], torch_pids: set[int], prefix: str) -> None:
    """Remove the named files, torch's of these processes ("torch_<pid>_..."), and whatever begins with ``prefix``."""

    def is_ours(name: str) -> bool:
        torch_file = re.match(r"torch_(\d+)_", name)
        return name.startswith(prefix) or bool(torch_file and int(torch_file[1]) in torch_pids)

    remove_named(names | {path.name for path in SHARED_MEMORY.iterdir() if is_ours(path.name)})


def remove_named(names: Iterable[str]) -> None:
    for name in names:
        with suppress(FileNotFoundError, PermissionError):  # somebody was faster; another user's
            (SHARED_MEMORY / name).unlink()
