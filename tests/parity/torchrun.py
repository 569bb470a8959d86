"""A worker of these tests on several ranks of this machine."""

import os
import subprocess
import sys
from pathlib import Path

from rlhf_mp.cluster.bootstrap import LAUNCHER_ENV
from rlhf_mp.cluster.first_failure import tail

ROOT = Path(__file__).parents[2]


def on_ranks(worker: Path, num_ranks: int, folder: Path, *words: str, timeout_s: float = 800) -> None:
    """``worker`` with ``words``, to its end; what it writes goes to ``folder/log``, and is shown if it fails."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_ENV}
    environment |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    environment["PYTHONFAULTHANDLER"] = "1"  # a worker that is aborted shows where
    with (folder / "log").open("ab") as log:
        done = subprocess.run(
            [*launch, str(worker), *words],
            env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=timeout_s, check=False,
        )  # fmt: skip
    assert done.returncode == 0, tail(folder / "log", 60)
