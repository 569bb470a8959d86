"""A compiler that was killed must not stop every later run; one at work must not be disturbed."""

import os
import subprocess
import sys

from rlhf_mp.train.compiler_locks import remove_abandoned_locks

HOLD = "import os, sys; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print('held', flush=True); input()"


def test_only_a_lock_that_nobody_holds_is_removed(tmp_path):
    for operator in ("cpu_adam", "deepspeed_shm_comm"):
        (tmp_path / operator).mkdir()
    held, abandoned = tmp_path / "cpu_adam" / "lock", tmp_path / "deepspeed_shm_comm" / "lock"
    os.close(os.open(abandoned, os.O_CREAT | os.O_EXCL))
    command = [sys.executable, "-c", HOLD, str(held)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as compiler:
        assert compiler.stdout.readline() == b"held\n"
        assert remove_abandoned_locks(tmp_path) == [abandoned]
        assert held.exists() and not abandoned.exists()
        compiler.kill()
    assert remove_abandoned_locks(tmp_path) == [held]
    assert remove_abandoned_locks(tmp_path) == []
