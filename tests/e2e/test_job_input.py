"""What is wrong with the input is said by the real launchers at once, and nothing is started for it."""

import math
import subprocess
import time
from pathlib import Path

import pytest
from job import QUICKSTART, command, environment
from quick_command import run_quickly

from rlhf_mp import checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def refused(words: list[str], run_dir: Path, limit_s: float = math.inf) -> str:
    """What a command says that must end with exit code 2 and start nothing."""
    process = run_quickly(limit_s, words, exit_code=2, env=environment())
    output = process.stdout + process.stderr
    assert "Traceback" not in output
    assert not (run_dir / "logs").exists()  # made before any other process is started
    return output


@pytest.fixture
def bad(tmp_path) -> Path:
    (tmp_path / "bad.yaml").write_text("actor_rollout_ref: {rollout: {name: vllm}}\n")
    return tmp_path / "bad.yaml"


def test_through_plain_python(bad, tmp_path):
    run_dir = tmp_path / "run"
    output = refused(command(bad, f"trainer.default_local_dir={run_dir}"), run_dir, limit_s=2)
    assert output.count("actor_rollout_ref.rollout.name=sglang") == 1


def test_through_deepspeed_where_two_ranks_find_it_and_one_speaks(bad, tmp_path):
    """In 5 s more than what the launcher itself needs, which a script that does nothing shows."""
    run_dir = tmp_path / "run"
    launch = command(bad, f"trainer.default_local_dir={run_dir}", num_ranks=2)
    (tmp_path / "nothing.py").touch()
    script = next(index for index, word in enumerate(launch) if word.endswith("launch/train.py"))
    start = time.monotonic()
    subprocess.run([*launch[:script], tmp_path / "nothing.py"], env=environment(), check=True, capture_output=True)
    launcher_s = time.monotonic() - start
    output = refused(launch, run_dir, limit_s=launcher_s + 5)
    assert output.count("actor_rollout_ref.rollout.name=sglang") == 1


@pytest.mark.parametrize("resume_from_path", [False, True])
def test_a_checkpoint_of_another_model_is_refused_before_anything_starts(inputs, tmp_path, resume_from_path):
    run_dir = tmp_path / "run"
    folder = checkpoint.folder_of(run_dir, 7)
    checkpoint.start(folder)
    checkpoint.finish(folder, {"step": 7, "model": {"hidden_size": 4096}, "num_ranks": 2})
    words = [*inputs, f"trainer.default_local_dir={run_dir}"]
    if resume_from_path:
        words += ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}"]
    output = refused(command(QUICKSTART, *words), run_dir)
    assert f"{folder} is of another model, with {{'hidden_size': 4096}}" in output
    assert f"{folder} was written by 2 rank(s)" not in output


def test_a_truncated_checkpoint_is_refused_before_anything_starts(inputs, tmp_path):
    run_dir = tmp_path / "run"
    folder = checkpoint.folder_of(run_dir, 7)
    (checkpoint.start(folder) / "actor.pt").write_bytes(bytes(1000))
    checkpoint.finish(folder, {"step": 7, "model": {}, "num_ranks": 2})
    (folder / "actor.pt").write_bytes(bytes(10))
    words = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}"]
    output = refused(command(QUICKSTART, *inputs, *words, f"trainer.default_local_dir={run_dir}"), run_dir)
    assert f"{folder / 'actor.pt'} has 10 bytes, 1000 were written" in output
