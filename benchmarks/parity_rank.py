"""One rank of ``benchmarks.parity``: trains with every engine that this number of ranks can form, one after another."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhf_mp.algorithms.losses import make_policy_loss
from rlhf_mp.algorithms.registered import advantage_estimators
from rlhf_mp.cluster.ranks import leave_ranks
from rlhf_mp.config.algorithm import AlgorithmConfig
from rlhf_mp.config.schema import (
    ActorConfig,
    DeepSpeedConfig,
    MegatronConfig,
    ModelConfig,
    OffloadConfig,
    OptimConfig,
)
from rlhf_mp.data.collate import collate
from rlhf_mp.data.partition import Cut, plan_step
from rlhf_mp.data.types import Trajectory
from rlhf_mp.models.heads import PolicyHead
from rlhf_mp.models.hf import DTYPES, load_causal_lm
from rlhf_mp.train import megatron_cpu
from rlhf_mp.train.accumulate import ForwardSettings
from rlhf_mp.train.base import TrainEngine
from rlhf_mp.train.torch_engine import TorchEngine
from rlhf_mp.trainer.loop import scored

CPU = torch.device("cpu")
PROMPTS, RESPONSES, MINI_BATCH, MAX_TOKENS = 8, 4, 4, 96
MEGATRON: dict[int, dict[str, dict[str, Any]]] = {
    1: {"": {}, " recompute": {"recompute": "full"}, " packed": {"packed": True}},
    2: {
        " TP2": {"tensor_model_parallel_size": 2},
        " TP2 SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        " PP2": {"pipeline_model_parallel_size": 2},
        " PP2 VPP2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        " CP2": {"context_parallel_size": 2},
        " DP2": {},
        " DP2, optimizer on the host": {"on_host": True},
        " TP2 SP packed": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "packed": True},
    },
    4: {" TP2 PP2 SP": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True}},
}


def trajectories(step: int) -> list[Trajectory]:
    """Groups of random responses of different lengths, rewarded at random, never all alike."""
    rng = random.Random(step)
    made = []
    for group in range(PROMPTS):
        prompt = [rng.randrange(2, 14) for _ in range(rng.randint(3, 8))]
        rewards = rng.sample([0.0, 1.0, *(float(rng.random() < 0.5) for _ in range(RESPONSES - 2))], RESPONSES)
        for reward in rewards:
            length = rng.randint(2, 12)
            ids = [rng.randrange(14) for _ in range(length)]  # padding and end tokens too
            logprobs = [-rng.uniform(1, 4) for _ in range(length)]
            made.append(Trajectory(prompt, ids, logprobs, [True] * length, reward, group, step, "stop"))
    return made


def actor_config(**own: Any) -> ActorConfig:
    actor = ActorConfig(optim=OptimConfig(lr=1e-4, betas=[0.9, 0.95]), clip_ratio_low=0.2, clip_ratio_high=0.28, **own)
    if actor.megatron.sequence_parallel is None:
        actor.megatron.sequence_parallel = False
    return actor


def settings(autocast: torch.dtype | None = None, *, packed: bool = False) -> ForwardSettings:
    return ForwardSettings(CPU, PolicyHead(packed=packed), autocast=autocast)


def train(engine: TrainEngine, actor: ActorConfig, num_steps: int) -> dict[str, Any]:
    """GRPO as the trainer does it: score, estimate, two updates a step. Collective."""
    loss_fn, losses, norms = make_policy_loss(actor), [], []
    for step in range(num_steps):
        whole = trajectories(step)
        plan = plan_step(
            [t.num_tokens for t in whole],
            [sum(t.loss_mask) for t in whole],
            [t.group_id for t in whole],
            num_ranks=engine.layout.dp_size,
            groups_per_minibatch=MINI_BATCH,
            ppo_epochs=1,
            train_cut=Cut(max_tokens=MAX_TOKENS),
            score_cut=Cut(max_tokens=MAX_TOKENS),
        )[engine.layout.dp_rank]
        batch = collate([whole[row] for row in plan.rows])
        batch.old_logprobs = scored(engine, batch, plan.score_rows)
        batch.advantages = advantage_estimators["grpo"](batch, AlgorithmConfig()).advantages
        for minibatch in plan.minibatches:
            parts = [batch.select(rows) for rows in minibatch.micro_batches]
            metrics = engine.train_step(parts, minibatch.totals, loss_fn)
            own = metrics["loss"][0] if engine.layout.is_output_rank else 0.0
            total = torch.tensor(own, dtype=torch.float64)
            if engine.layout.dp_size > 1 or not isinstance(engine, TorchEngine):
                dist.all_reduce(total)
            losses.append(total.item())
            norms.append(metrics["grad_norm"][0])
    weights = {name: tensor.detach().clone() for name, tensor in engine.weights()}
    return {"losses": losses, "grad_norms": norms, "weights": weights}


@contextmanager
def torch_engine(path: str, dtype: str, num_updates: int) -> Iterator[tuple[TrainEngine, ActorConfig]]:
    actor, autocast = actor_config(), None if dtype == "float32" else DTYPES[dtype]
    yield TorchEngine(load_causal_lm(path, torch.float32), settings(autocast), actor, num_updates), actor


@contextmanager
def zero3_engine(
    path: str, dtype: str, num_updates: int, *, on_host: bool = False
) -> Iterator[tuple[TrainEngine, ActorConfig]]:
    from rlhf_mp.train.deepspeed_engine import DeepSpeedEngine

    zero = DeepSpeedConfig(zero_stage=3, param_persistence_threshold=0)
    actor = actor_config(deepspeed=zero, fsdp_config=OffloadConfig(param_offload=on_host, optimizer_offload=on_host))
    engine = DeepSpeedEngine(lambda: load_causal_lm(path, DTYPES[dtype]), settings(), actor, num_updates, dtype)
    yield engine, actor
    engine.engine.destroy()


@contextmanager
def megatron_engine(
    path: str, dtype: str, num_updates: int, *, packed: bool = False, on_host: bool = False, **knobs: Any
) -> Iterator[tuple[TrainEngine, ActorConfig]]:
    from megatron.core import parallel_state

    from rlhf_mp.train.megatron_engine import MegatronEngine

    actor = actor_config(megatron=MegatronConfig(**knobs), fsdp_config=OffloadConfig(optimizer_offload=on_host))
    model = ModelConfig(path=path, dtype=dtype, enable_gradient_checkpointing="recompute" in knobs)
    yield MegatronEngine(model, settings(packed=packed), actor, num_updates), actor
    parallel_state.destroy_model_parallel()


def engines(world: int) -> dict[str, tuple[Callable, dict[str, Any]]]:
    found: dict[str, tuple[Callable, dict[str, Any]]] = {"torch": (torch_engine, {})} if world == 1 else {}
    if world <= 2:
        found["DeepSpeed ZeRO-3"] = (zero3_engine, {})
        found["DeepSpeed ZeRO-3, all on the host"] = (zero3_engine, {"on_host": True})
    return found | {f"Megatron{name}": (megatron_engine, knobs) for name, knobs in MEGATRON[world].items()}


def main(folder: str, num_steps: str) -> None:
    """Reads ``folder/model`` and writes a file for each engine."""
    megatron_cpu.install()
    from rlhf_mp.train.deepspeed_engine import init_distributed

    init_distributed()
    world, steps = dist.get_world_size(), int(num_steps)
    for dtype in ("float32", "bfloat16"):
        for order, (layout, (make, knobs)) in enumerate(engines(world).items()):
            with make(f"{folder}/model", dtype, 2 * steps, **knobs) as (engine, actor):
                result = train(engine, actor, steps)
            result |= {"layout": layout, "ranks": world, "dtype": dtype, "order": order}
            if dist.get_rank() == 0:
                torch.save(result, Path(folder, f"{dtype}_{world}_{order}.pt"))
            dist.barrier()
    leave_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
