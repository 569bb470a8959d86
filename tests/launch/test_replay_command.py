"""The command on a batch of reinforcement learning whose loss is no number: it names the tokens. One process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_mp.config.load import config_from_dict, dump_config
from rlhf_mp.data import step_batch
from rlhf_mp.data.collate import collate
from rlhf_mp.data.step_batch import StepBatch
from rlhf_mp.data.types import MiniBatch, Totals, Trajectory

ROOT = Path(__file__).parents[2]
UNLUCKY, OTHER = [6, 12, 7, 13], [3, 12, 4, 13]  # prompts in the vocabulary of the checkpoint, see unlucky_loss.py


def run_directory(folder: Path, model: Path, rows: list[list[int]]) -> Path:
    """A run of one torch rank with the batch of its first step: two responses to each prompt."""
    tree = {
        "data": {"train_files": "none.jsonl", "train_batch_size": len(rows)},
        "actor_rollout_ref": {
            "model": {"path": str(model), "dtype": "float32", "enable_gradient_checkpointing": False},
            "actor": {
                "strategy": "torch",
                "ppo_mini_batch_size": len(rows),
                "policy_loss": "tests.e2e.unlucky_loss:ppo_clip_but_unlucky",
            },
        },
        "trainer": {"n_gpus_per_node": 1, "device": "cpu"},
    }
    batch = collate(
        [
            Trajectory(prompt, [4 + i, 1], [-1.0, -0.5], [True, True], float(i), group, 0, "stop")
            for group, prompt in enumerate(rows)
            for i in range(2)
        ]
    )
    batch.advantages = (2 * batch.rewards - 1)[:, None] * batch.mask
    count = len(batch.tokens)
    cut = [[0, 1], [*range(2, count)]]
    updates = {"actor": [MiniBatch(cut, Totals(2 * count, count))]}
    place = step_batch.folder_of(folder, 1)
    step_batch.write(place, StepBatch(1, 0, 1, batch, updates, {"actor": [0]}, 5, [0] * count))
    dump_config(config_from_dict(tree), place / "config.yaml")
    return folder


def replayed(run_dir: Path) -> tuple[dict, str]:
    out = run_dir / "replay.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch" / "replay.py"), str(run_dir), "--step", "1", "--json", str(out)],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text()), done.stdout


@pytest.mark.engine
def test_the_tokens_at_which_a_loss_stops_being_a_number_are_named(tmp_path, tiny_checkpoint):
    found, printed = replayed(run_directory(tmp_path, tiny_checkpoint, [OTHER, UNLUCKY]))
    assert found["metrics"]["actor/grad_norm"] != found["metrics"]["actor/grad_norm"]  # it is no number here either
    named = [(one["finding"]["what"], one["finding"]["row"], one["tokens"]) for one in found["found"]]
    assert named == [("the loss", 2, [[4, 4]]), ("the loss", 3, [[4, 5]])]
    assert "actor, update 1: the loss, row 3 of rank 0 (group 1, reward 1): token 4 ('3', id 5)" in printed


@pytest.mark.engine
def test_a_healthy_batch_has_nothing_to_name(tmp_path, tiny_checkpoint):
    found, printed = replayed(run_directory(tmp_path, tiny_checkpoint, [OTHER, OTHER]))
    assert found["found"] == [] and found["metrics"]["actor/grad_norm"] > 0
    assert "the run logged nothing of this step" in printed
