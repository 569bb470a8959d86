"""The copy of a checkpoint that is written in the background takes the host memory that the plan says."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from rlhf_mp.config.derive import derive
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.planner.preflight import Machine, plan_of
from rlhf_mp.planner.term import Component
from rlhf_mp.train.build import make_actor

CPU = torch.device("cpu")


@pytest.mark.parametrize(("optimizer", "each"), [("adamw", 4 + 8), ("sgd", 4 + 4)])
def test_a_snapshot_of_plain_torch_is_as_large_as_planned(tiny_checkpoint, tmp_path, optimizer, each):
    config = RunConfig()
    config.data.train_files = ["x.jsonl"]
    config.trainer.async_save, config.trainer.n_gpus_per_node = True, 1
    config.actor_rollout_ref.model.path = str(tiny_checkpoint)
    config.actor_rollout_ref.model.dtype = "float32"
    config.actor_rollout_ref.actor.strategy = "torch"
    config.actor_rollout_ref.actor.optim.optimizer = optimizer
    derive(config)
    engine = make_actor(config, CPU, num_updates=1)
    for parameter in engine.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    engine.optimizer.step()
    copied = size_of(engine.snapshot(tmp_path))
    (planned,) = {
        term.bytes
        for moment in plan_of(config, Machine(None, None)).moments
        for term in moment.terms
        if term.component is Component.checkpoint
    }
    assert planned == each * sum(p.numel() for p in engine.module.parameters())
    assert copied == pytest.approx(planned, rel=0.001)  # a counter for every parameter beside it


def size_of(snapshot) -> int:
    """Bytes of its tensors' storages, each once."""
    tensors = [leaf for _, state in snapshot._files for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
