"""Both sides of a comparison run as processes of their own, and end with the benchmark."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.process import run_logged
from rlhf_mp.cluster.first_failure import wait_until

ROOT = Path(__file__).parents[2]


def test_a_failed_side_is_reported_with_the_end_of_its_log(tmp_path):
    script = "import sys; print('\\n'.join(map(str, range(100)))); sys.exit(3)"
    with pytest.raises(RuntimeError, match=r"ended with 3(.|\n)*\n98\n99$"):
        run_logged([sys.executable, "-c", script], tmp_path / "log.txt", 1)


def test_cores_are_shared_out_as_threads(tmp_path):
    script = "import os; print(os.environ['OMP_NUM_THREADS'])"
    run_logged([sys.executable, "-c", script], tmp_path / "log.txt", 1000)
    assert (tmp_path / "log.txt").read_text() == "1\n"


def test_a_benchmark_that_is_ended_leaves_nothing_behind(tmp_path):
    mark = f"{tmp_path}/side"
    side = f"from pathlib import Path; import time; Path({mark!r}).write_text('x'); time.sleep(300)"
    script = f"""
import sys
from pathlib import Path
from benchmarks.process import run_logged
run_logged([sys.executable, "-c", {side!r}], Path({str(tmp_path / "log")!r}), 1)
"""
    benchmark = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.DEVNULL)
    assert wait_until(Path(mark).exists, 20)
    benchmark.terminate()
    assert benchmark.wait(20) != 0
    assert wait_until(lambda: not _running(mark), 5)


def _running(text: str) -> list[str]:
    found = subprocess.run(["pgrep", "-f", text], capture_output=True, text=True)
    return found.stdout.split()
