"""Cores, on this machine's own."""

import os
import subprocess
import sys

KEEP = """
import os, threading, time
from rlhf_mp.cluster.cores import keep_to
threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
first = min(os.sched_getaffinity(0))
keep_to([first])
threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
print({frozenset(os.sched_getaffinity(int(t))) == {first} for t in os.listdir("/proc/self/task")})
"""


def test_threads_that_are_there_and_those_that_come_keep_to_the_cores():
    found = subprocess.run([sys.executable, "-c", KEEP], capture_output=True, text=True, env={**os.environ})
    assert found.stdout == "{True}\n", found.stderr
