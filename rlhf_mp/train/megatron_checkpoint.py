"""Megatron checkpoints: written in one layout of tensor, pipeline and data parallelism, read in any other."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest, TemporalAsyncCaller
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER, MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

from rlhf_mp.errors import CheckpointError
from rlhf_mp.train.base import Writing

ADAM = {"lr", "betas", "eps", "weight_decay"}


def save(directory: Path, models: list[DistributedDataParallel], optimizer: MegatronOptimizer, step: int) -> None:
    """Collective."""
    _make(directory)
    dist_checkpointing.save(_sharded_state(models, optimizer, step, is_loading=False), str(directory))


def snapshot(
    directory: Path, models: list[DistributedDataParallel], optimizer: MegatronOptimizer, step: int
) -> Writing:
    """Collective. A process forked from this one writes: it has the tensors as they are now."""
    _make(directory)
    state = _sharded_state(models, optimizer, step, is_loading=False)
    return _Forked(dist_checkpointing.save(state, str(directory), async_sharded_save=True))


class _Forked:
    """Megatron's writer of one rank."""

    def __init__(self, request: AsyncRequest):
        self.request, self.caller = request, TemporalAsyncCaller()
        self.caller.schedule_async_call(request)

    def write(self) -> None:
        self.caller.close()  # waits for it

    def finish(self) -> None:
        for finalize in self.request.finalize_fns:  # these say if a process did not write all it should
            finalize()


def _make(directory: Path) -> None:
    if dist.get_rank() == 0:
        directory.mkdir(parents=True)
    dist.barrier()


def load(directory: Path, models: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> int:
    """Collective. Returns the step it was saved with."""
    if not (directory / "metadata.json").is_file():
        raise CheckpointError(f"{directory}: no Megatron checkpoint there")
    state = dist_checkpointing.load(_sharded_state(models, optimizer, 0, is_loading=True), str(directory))
    for name, model in _named(models).items():
        model.module.load_state_dict(state[name])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def _named(models: list[DistributedDataParallel]) -> dict[str, DistributedDataParallel]:
    return {"model": models[0]} if len(models) == 1 else {f"model{i}": model for i, model in enumerate(models)}


def _sharded_state(
    models: list[DistributedDataParallel], optimizer: MegatronOptimizer, step: int, *, is_loading: bool
) -> dict[str, Any]:
    # Of the formats for a distributed optimizer the one that any other layout can read.
    wanted = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
    metadata = ensure_metadata_has_dp_cp_group(wanted)
    state = {name: model.module.sharded_state_dict(metadata=metadata) for name, model in _named(models).items()}
    of_models = dict(state) if len(models) > 1 else dict(state["model"])
    state["optimizer"] = optimizer.sharded_state_dict(of_models, is_loading=is_loading, metadata=metadata)
    return state | {"step": step}


class _TorchAdamCheckpoints(DistributedOptimizer):
    """Megatron's distributed optimizer, around torch's AdamW (without Transformer Engine or apex).

    As it is (0.16.1) it needs optimizer state to exist before the first step, looks in a checkpoint for a "step" of
    each parameter that is stored once per group, writes to parameters that require grad, and leaves all parameters
    with one and the same "step" tensor, which AdamW then increments once for each of them.
    """

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        _make_moments(self.optimizer)
        return super().sharded_state_dict(*args, **kwargs)

    def _set_main_param_and_optimizer_states(self, model_param, tensors: dict[str, torch.Tensor]) -> None:
        group, index = self.model_param_group_index_map[model_param]
        p = self.optimizer.param_groups[group]["params"][index]
        _fill({"param": self.stepped(p)} | self.optimizer.state[p], tensors)

    def stepped(self, p: torch.Tensor) -> torch.Tensor:
        """What the optimizer changes, for a shard of the model that it was given."""
        return p

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()


class _OffloadedCheckpoints(_TorchAdamCheckpoints):
    """The same around the optimizer that steps in host memory, with or without Transformer Engine.

    As it is (0.16.1) that one reads a checkpoint only where its master weights are copies in another type, and writes
    classes into it, which no safe reader takes. Here both kinds are filled in place, so nothing has to be made anew,
    and what is written is what the other one would write: each continues from the other's.
    """

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        for group in state["optimizer"]["param_groups"]:
            for name in self.optimizer.defaults.keys() - ADAM:
                group.pop(name, None)
        return state

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        for part in self.optimizer.sub_optimizers:
            _make_moments(part)
        self.optimizer._sync_sub_optimizers_state_to_hdo()
        return DistributedOptimizer.sharded_state_dict(self, *args, **kwargs)

    def stepped(self, p: torch.Tensor) -> torch.Tensor:
        return self.optimizer.param_to_inner_param[p]

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "param_state" not in state_dict:  # Megatron prepares: it hands us our own
            return
        self.optimizer._update_fp32_params_by_new_state = lambda: None  # they are up to date
        self.load_parameter_state_from_fully_reshardable(state_dict["param_state"])
        step = state_dict["optimizer"]["param_groups"][0]["step"]
        for state in self.optimizer.state.values():
            state["step"].fill_(step)


def _make_moments(optimizer: torch.optim.Optimizer) -> None:
    """What AdamW makes at its first step, where it has not made one."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not optimizer.state[p]:
                zeros = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                optimizer.state[p] = {"step": torch.zeros(()), **zeros}


def _fill(own: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    for name in ("param", "exp_avg", "exp_avg_sq"):
        own[name].copy_(tensors[name])


def with_adam(optimizer: MegatronOptimizer) -> None:
    """Make the checkpoints of ``optimizer``, which steps with AdamW, ones that it can continue from."""
    for part in optimizer.chained_optimizers:
        if not isinstance(part, DistributedOptimizer):
            continue
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            part.__class__ = _OffloadedCheckpoints
        elif USING_PYTORCH_OPTIMIZER:
            part.__class__ = _TorchAdamCheckpoints


def with_momentum(optimizer: MegatronOptimizer) -> None:
    """Make the checkpoints of ``optimizer``, which steps with SGD, hold its momentum.

    Megatron (0.16.1) calls what makes an optimizer's state before it loads one, and has nothing to call for SGD. A
    momentum of 0 is what the first step starts from anyway.
    """
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for p in group["params"] if group["momentum"] else ():
                part.optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        part.init_state_fn = lambda *_: None
