"""A model of 0.8 M parameters that adds digits with some success, and the overrides that make it a job."""

import json
import shutil
from pathlib import Path

import torch

ADDITIONS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10 - a)]
BATCH, MAX_STEPS, ACCURACY = 32, 500, 0.3


def warm_start(model: Path) -> None:
    """Fine-tune until some answers are right: equal rewards in every group would leave nothing to learn from."""
    from rlhf_mp.algorithms.supervised import fine_tuning_loss
    from rlhf_mp.config.schema import ActorConfig, OptimConfig
    from rlhf_mp.data.types import Totals
    from rlhf_mp.models.heads import PolicyHead
    from rlhf_mp.models.hf import load_causal_lm, load_tokenizer
    from rlhf_mp.quickstart import accuracy, batch_of
    from rlhf_mp.train.accumulate import ForwardSettings
    from rlhf_mp.train.torch_engine import TorchEngine

    batch = batch_of(ADDITIONS, load_tokenizer(str(model)))
    settings = ForwardSettings(torch.device("cpu"), PolicyHead())
    actor = ActorConfig(optim=OptimConfig(lr=3e-4, weight_decay=0.0))
    engine = TorchEngine(load_causal_lm(str(model), torch.float32), settings, actor, MAX_STEPS)
    totals = Totals(int(batch.mask.sum()), len(batch.tokens))
    for _ in range(MAX_STEPS):
        if accuracy(engine, batch) >= ACCURACY:
            engine.module.save_pretrained(model)
            return
        engine.train_step([batch], totals, fine_tuning_loss("token-mean"))
    raise RuntimeError(f"accuracy {ACCURACY} not reached in {MAX_STEPS} steps")


def make_inputs(checkpoint: Path, folder: Path) -> list[str]:
    """Overrides that turn configs/quickstart.yaml into a job of half a second a step."""
    shutil.copytree(checkpoint, folder / "model")
    warm_start(folder / "model")
    for name, rows in {"train": ADDITIONS, "val": ADDITIONS[::7]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"data.train_files={folder / 'train.jsonl'}",
        f"data.val_files={folder / 'val.jsonl'}",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.num_engines=1",
        "actor_rollout_ref.rollout.max_num_seqs=32",
    ]
