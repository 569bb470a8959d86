"""DeepSpeed compiles operators at first use, under a lock file. One that a killed run left would stop all others."""

import contextlib
import os
from pathlib import Path


def remove_abandoned_locks(root: Path) -> list[Path]:
    """Remove the locks under ``root`` that no process of this host holds open, as a compiling one does. Returns them.

    Not for a folder that other hosts compile in too: their processes are not seen here.
    """
    held = open_files()
    abandoned = [lock for lock in root.rglob("lock") if str(lock.resolve()) not in held]
    for lock in abandoned:
        lock.unlink(missing_ok=True)
    return abandoned


def build_root() -> Path:
    """Where torch's extensions are compiled, DeepSpeed's operators among them."""
    own = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(own) if own else Path.home() / ".cache" / "torch_extensions"


def open_files() -> set[str]:
    """What the processes of this host, as far as this user may look, have open."""
    found = set()
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            found |= {os.readlink(entry) for entry in os.scandir(f"/proc/{process}/fd")}
    return found
