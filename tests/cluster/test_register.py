"""A rank writes itself into the folder of its job, which others may be removing."""

import os
import shutil
import threading
from pathlib import Path

from rlhf_mp.cluster.local_ranks import register


def test_a_rank_registers_while_the_guard_of_one_that_has_ended_removes_the_folder():
    job, stop = f"test{os.getpid()}", threading.Event()
    tmp = Path(f"/tmp/rlhf_mp_{job}")

    def remove():
        while not stop.is_set():
            shutil.rmtree(tmp, ignore_errors=True)

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        for number in range(300):
            assert register(job, f"{number}.1.1") == tmp
    finally:
        stop.set()
        remover.join()
        shutil.rmtree(tmp, ignore_errors=True)
