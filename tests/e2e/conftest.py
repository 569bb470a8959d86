"""A model and data small enough for many jobs, and a way to start them that cleans up after a failed test."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from job import Job

ADDITIONS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10 - a)]
BATCH, MAX_STEPS, ACCURACY = 32, 500, 0.3


def warm_start(model: Path) -> None:
    """Fine-tune until some answers are right: equal rewards in every group would leave nothing to learn from."""
    from rlhf_mp.config.schema import ActorConfig, OptimConfig
    from rlhf_mp.data.types import Totals
    from rlhf_mp.models.heads import PolicyHead
    from rlhf_mp.models.hf import load_causal_lm, load_tokenizer
    from rlhf_mp.quickstart import accuracy, batch_of, cross_entropy
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
        engine.train_step([batch], totals, cross_entropy)
    raise RuntimeError(f"accuracy {ACCURACY} not reached in {MAX_STEPS} steps")


@pytest.fixture(scope="session")
def inputs(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that turn configs/quickstart.yaml into a job of half a second a step."""
    import shutil

    folder = tmp_path_factory.mktemp("inputs")
    shutil.copytree(tiny_checkpoint, folder / "model")
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


ONE_RANK = [
    "actor_rollout_ref.actor.strategy=torch",
    "actor_rollout_ref.actor.fsdp_config.param_offload=false",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=false",
]


@pytest.fixture(scope="module")
def start(inputs: list[str]) -> Iterator[Callable[..., Job]]:
    """``start(run_dir, *overrides, num_ranks=1)``: DeepSpeed with several ranks, plain torch with one."""
    jobs = []

    def start_job(run_dir: Path, *overrides: str, num_ranks: int = 1) -> Job:
        own = ONE_RANK if num_ranks == 1 else []
        jobs.append(Job(run_dir, *inputs, *own, *overrides, num_ranks=num_ranks))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.stop()
