"""Another malloc than the C library's: it is chosen before a process starts, so a rank starts itself again with it.

Host memory that is allocated and freed in large, changing sizes (offloaded states, gathered weights) fragments; these
two libraries return more of it.
"""

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from rlhf_mp.config.schema import RunConfig
from rlhf_mp.errors import Absent, Problem

KEY = "trainer.host_allocator"
FILES = {"tcmalloc": ("libtcmalloc.so.4", "libtcmalloc_minimal.so.4"), "jemalloc": ("libjemalloc.so.2",)}
PACKAGES = {"tcmalloc": "libtcmalloc-minimal4", "jemalloc": "libjemalloc2"}  # Debian's and Ubuntu's
FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")


def find_library(allocator: str) -> Path | None:
    """Where the system, the environment, or Ray, which brings jemalloc along, has it."""
    folders = [*map(Path, FOLDERS), Path(sys.prefix) / "lib"]
    places = [folder / name for folder in folders for name in FILES[allocator]]
    ray = find_spec("ray")
    if allocator == "jemalloc" and ray is not None:
        places.append(Path(ray.origin).parent / "core" / "libjemalloc.so")
    return next((place for place in places if place.exists()), None)


def allocator_problems(config: RunConfig) -> Iterator[Problem]:
    wanted = config.trainer.host_allocator
    if wanted != "system" and find_library(wanted) is None:
        fix = f"apt install {PACKAGES[wanted]}, or {KEY}=system"
        yield Absent(KEY, wanted, f"no {' or '.join(FILES[wanted])} on this machine", fix)


def use_allocator(wanted: str) -> None:
    """Start this process again with ``wanted`` loaded before everything else, unless it is. Keeps its process id."""
    if wanted == "system":
        return
    library = str(find_library(wanted))
    loaded = os.environ.get("LD_PRELOAD", "").split(":")
    if library in loaded:
        return
    os.environ["LD_PRELOAD"] = ":".join([library, *filter(None, loaded)])
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def loaded_allocator(maps: str) -> str:
    """The allocator of a process, by the libraries in its /proc/PID/maps."""
    return next((name for name in FILES if f"lib{name}" in maps), "system")
