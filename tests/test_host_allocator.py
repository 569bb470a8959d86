"""The ranks' malloc: found, loaded by starting again, or a clear message."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_mp.config.load import config_from_dict
from rlhf_mp.errors import Absent
from rlhf_mp.host_allocator import allocator_problems, find_library, loaded_allocator

ROOT = Path(__file__).parents[1]
AGAIN = """
import os, sys
from pathlib import Path
from rlhf_mp.host_allocator import loaded_allocator, use_allocator
use_allocator(sys.argv[1])
print(os.getpid(), loaded_allocator(Path("/proc/self/maps").read_text()), *sys.argv[2:])
"""


def test_a_process_starts_again_with_it_and_stays_the_same_process():
    if find_library("jemalloc") is None:
        pytest.skip("no jemalloc here")
    job = subprocess.Popen(
        [sys.executable, "-c", AGAIN, "jemalloc", "a b", "--c"],
        stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert job.communicate()[0] == f"{job.pid} jemalloc a b --c\n"
    assert job.returncode == 0


def test_the_systems_own_needs_no_start():
    done = subprocess.run([sys.executable, "-c", AGAIN, "system"], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split()[1:] == ["system"]


def test_one_that_is_not_there_says_what_to_install(monkeypatch):
    config = config_from_dict({"actor_rollout_ref": {"model": {"path": "m"}}}, ["trainer.host_allocator=tcmalloc"])
    monkeypatch.setattr("rlhf_mp.host_allocator.find_library", lambda name: None)
    (problem,) = allocator_problems(config)
    assert isinstance(problem, Absent) and "apt install libtcmalloc-minimal4" in str(problem)


def test_what_is_loaded_is_read_from_the_maps():
    line = "7f0 r-xp 00000000 08:01 12 /usr/lib/x86_64-linux-gnu/{}\n"
    names = ["libtcmalloc_minimal.so.4.5.9", "libjemalloc.so.2", "libc.so.6"]
    assert [loaded_allocator(line.format(name)) for name in names] == ["tcmalloc", "jemalloc", "system"]
