"""The disk of the run directory fills up while a checkpoint is being written."""

import subprocess

import pytest

from rlhf_mp import checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]
ROOM = "16m"  # for one checkpoint of 10 MB, not for two


@pytest.fixture
def small_disk(tmp_path):
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", tmp_path], capture_output=True, text=True
    )
    if mount.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted here: {mount.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def test_a_full_disk_ends_the_run_with_the_files_name_and_the_older_checkpoint(start, small_disk):
    run_dir = small_disk / "run"
    words = ("trainer.total_training_steps=3", "trainer.save_freq=1", "trainer.val_before_train=false")
    job = start(run_dir, *words, "trainer.skip_plan=true")  # which would refuse to start
    assert job.wait() == 1
    job.assert_nothing_left()
    unfinished = checkpoint.unfinished(checkpoint.folder_of(run_dir, 2))
    assert f"rank 0: {unfinished}/actor/torch_engine.pt could not be written" in job.output()
    assert "trainer.default_local_dir=" in job.output()
    assert "Traceback" not in job.output()
    (kept,) = (run_dir / "checkpoints").iterdir()
    assert kept == checkpoint.folder_of(run_dir, 1)
    assert list(checkpoint.damage(kept, checksums=True)) == []
    assert checkpoint.read_state(kept, checksums=True)["step"] == 1


def test_a_run_is_not_started_that_would_fill_the_disk(start, small_disk):
    job = start(small_disk / "run", "trainer.total_training_steps=3", "trainer.save_freq=1")
    assert job.wait() == 2
    assert "trainer.default_local_dir" in job.output() and "MiB are free there" in job.output()
