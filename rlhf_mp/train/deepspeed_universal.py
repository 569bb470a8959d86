"""DeepSpeed's sharded checkpoints for another number of ranks, by way of its universal format.

Source: Universal Checkpointing, arXiv:2406.18820; DeepSpeed 0.19, checkpoint/ds_to_universal.py.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from rlhf_mp.errors import CheckpointError

UNIVERSAL = "universal"
"""The tag of what was converted, in the folder of what it was converted from: it goes when that goes."""

MAX_WORKERS = 8


def num_shards(saved: Path) -> int:
    """How many ranks an optimizer's state is spread over; 0 where each has all of it (ZeRO stage 0)."""
    return len([*saved.glob("*_optim_states.pt")])


def convert(saved: Path) -> None:
    """Write the universal form of ``saved`` beside it, unless it is there. On one rank, while the others wait.

    Raises:
        CheckpointError: DeepSpeed could not convert it; with the command to try by hand.
    """
    target = saved.with_name(UNIVERSAL)
    if target.is_dir():
        return
    unfinished = saved.with_name(f"{UNIVERSAL}.writing")
    shutil.rmtree(unfinished, ignore_errors=True)
    workers = str(min(MAX_WORKERS, len(os.sched_getaffinity(0))))
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--num_extract_workers", workers, "--num_merge_workers", workers]
    done = subprocess.run(
        [*command, "--input_folder", str(saved), "--output_folder", str(unfinished)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        shutil.rmtree(unfinished, ignore_errors=True)
        by_hand = " ".join([*command, "--input_folder", str(saved), "--output_folder", str(target)])
        raise CheckpointError(
            f"{saved} could not be converted for another number of ranks: {done.stderr[-2000:]}\n    fix: {by_hand}"
        )
    unfinished.rename(target)
