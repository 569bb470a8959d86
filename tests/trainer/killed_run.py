"""A run that is killed again and again while it saves: what of it can be resumed.

  python tests/trainer/killed_run.py --kills 50

Each time a process continues from the newest checkpoint, trains a small model and is killed at a random time after it
has begun to save.
"""

import argparse
import hashlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from rlhf_mp import checkpoint
from rlhf_mp.algorithms.supervised import fine_tuning_loss
from rlhf_mp.cluster.first_failure import wait_until
from rlhf_mp.cluster.ranks import Ranks
from rlhf_mp.config.schema import ActorConfig, OptimConfig
from rlhf_mp.data.types import TokenBatch, Totals
from rlhf_mp.models.heads import PolicyHead
from rlhf_mp.models.hf import load_causal_lm
from rlhf_mp.models.tiny import character_tokenizer, make_checkpoint
from rlhf_mp.train.accumulate import ForwardSettings
from rlhf_mp.train.torch_engine import TorchEngine
from rlhf_mp.trainer.checkpoints import RunCheckpoints

SAVE_FREQ, NUM_STEPS, KEEP = 2, 10_000, 2


class Run:
    """As much of a trainer as saving and resuming need, around a real engine."""

    def __init__(self, run_dir: Path, model: str, *, in_background: bool, say: Callable[[str], None] = print):
        settings = ForwardSettings(torch.device("cpu"), PolicyHead())
        config = ActorConfig(optim=OptimConfig(lr=1e-4))
        self.engine = TorchEngine(load_causal_lm(model, torch.float32), settings, config, NUM_STEPS)
        self.trained, self.best, self.step, self.data = {"actor": self.engine}, None, 0, 0
        self.checkpoints = RunCheckpoints(
            run_dir, Ranks(0, 1), keep=KEEP, resume_from=None, resume=True, identity={}, trained={}, export=None,
            say=say, in_background=in_background,
        )  # fmt: skip

    def state_dict(self) -> dict[str, int]:
        return {"data": self.data}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.data = state["data"]

    def train_step(self) -> None:
        tokens = torch.randint(2, 12, (4, 8), generator=torch.Generator().manual_seed(self.data))
        ones = torch.ones(4, 8)
        batch = TokenBatch(tokens, ones, ones[:, 0], torch.arange(4), torch.full((4,), 8), ones * 0)
        self.engine.train_step([batch], Totals(32, 4), fine_tuning_loss("token-mean"))
        self.data, self.step = self.data + 1, self.step + 1

    def digest(self) -> str:
        """Of weights and optimizer."""
        found = hashlib.sha256()
        for _, tensor in self.engine.tensors():
            found.update(tensor.detach().numpy().tobytes())
        return found.hexdigest()

    def train(self, progress: Path) -> None:
        """Until somebody kills it; a line for each step that is done, with what the weights are then."""
        with progress.open("a", buffering=1) as out:
            while self.step < NUM_STEPS:
                self.train_step()
                out.write(f"{self.step} {self.digest()}\n")
                if self.step % SAVE_FREQ == 0:
                    self.checkpoints.save(self)
                else:
                    self.checkpoints.settle(wait=False)


@dataclass
class Tally:
    """What was seen over all kills."""

    kills: int = 0
    while_saving: int = 0  # something half-written was left
    most_lost: int = 0  # steps that had to be made again
    step: int = 0


def kill_again_and_again(run_dir: Path, model: str, kills: int, *, in_background: bool, seed: int = 0) -> Tally:
    """
    Raises:
        AssertionError: a resume went wrong.
    """
    progress, chance, tally, digests = run_dir / "progress", random.Random(seed), Tally(), {}
    lines: list[list[str]] = []
    run_dir.mkdir(parents=True)
    progress.touch()
    fork = get_context("fork")
    for _ in range(kills):
        started = Run(run_dir, model, in_background=in_background, say=lambda text: None)
        started.checkpoints.load_newest(started)
        done = max(digests, default=0)
        if started.step:
            assert started.digest() == digests[started.step], f"other weights at step {started.step}"
            assert started.data == started.step
        assert started.step % SAVE_FREQ == 0
        tally.most_lost = max(tally.most_lost, done - started.step)
        child = fork.Process(target=started.train, args=(progress,))
        child.start()
        assert wait_until(lambda known=len(lines): len(progress.read_text().splitlines()) > known + SAVE_FREQ, 60)
        time.sleep(chance.uniform(0.0, 0.5))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        lines = [line.split() for line in progress.read_text().splitlines(keepends=True) if line.endswith("\n")]
        for step, digest in lines:
            assert digests.setdefault(int(step), digest) == digest, f"step {step} was another the second time"
        tally.kills += 1
        tally.while_saving += any((run_dir / "checkpoints").glob(".writing-*"))
        tally.step = max(digests, default=0)
    return tally


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        make_checkpoint(model, character_tokenizer("0123456789+= "))
        for in_background in (False, True):
            run_dir = Path(folder, f"run_{in_background}")
            tally = kill_again_and_again(run_dir, str(model), args.kills, in_background=in_background)
            whole = [checkpoint.step_of(f) for f in checkpoint.newest_first(run_dir)]
            print(f"async_save={str(in_background).lower()}: {tally}, whole checkpoints {whole}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
