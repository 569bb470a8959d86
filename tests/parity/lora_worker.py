"""One rank of LoRA's parity test: ZeRO stages and offloads against TorchEngine with the same adapter, in one launch."""

import json
import sys
from pathlib import Path
from typing import ClassVar

import torch
import torch._dynamo  # before DeepSpeed builds a model
import torch.distributed as dist
from oracle import HEADS, NUM_STEPS, Oracle, largest_difference, settings, worst
from torch import nn
from zero_worker import builder, case, run_case

from rlhf_mp.cluster.ranks import leave_ranks
from rlhf_mp.config.schema import ActorConfig, ModelConfig, OffloadConfig
from rlhf_mp.models.heads import Head
from rlhf_mp.models.lora import add_adapter
from rlhf_mp.models.merge import checkpoint_tensors
from rlhf_mp.planner.term import Component
from rlhf_mp.train.adapted import BaseScorer, adapter_weights
from rlhf_mp.train.deepspeed_engine import DeepSpeedEngine, DeepSpeedScorer, init_distributed

CASES = [(0, False, False), (1, False, False), (2, False, True), (3, False, False), (3, True, True)]
CRITIC_CASES = [(2, False, True), (3, False, False)]
QUANTIZED_CASES = [(2, False, False), (3, True, True)]
RESUMED = [((0, False, False), "float32"), ((2, False, False), "bfloat16"), ((3, True, True), "float32")]
PACKED = (3, True, True)
HALF = NUM_STEPS // 2


class AdapterOracle(Oracle):
    """Every rank draws adapters of its own: those of rank 0 are the ones that count."""

    quantization: ClassVar[str | None] = None

    def build(self, head: Head, dtype: torch.dtype) -> nn.Module:
        module = head.load(self.path, dtype, quantization=self.quantization)
        model = ModelConfig(self.path, lora_rank=4, lora_alpha=12)
        torch.manual_seed(dist.get_rank() if hasattr(self, "trained") else 0)  # the oracle's own is everybody's
        return add_adapter(module, module.model.layers, model, head, dtype)

    def smallest_move(self) -> float:
        """Of the matrices with an adapter."""
        moves = (self.weights[name] - start for name, start in self.checkpoint.items() if "_proj.weight" in name)
        return min(move.abs().max().item() for move in moves)


class FourBitOracle(AdapterOracle):
    """The base's matrices in 4 bits."""

    quantization = "nf4"


class EightBitOracle(AdapterOracle):
    quantization = "int8"


def engine_of(oracle: Oracle, config: ActorConfig, dtype: str = "float32") -> DeepSpeedEngine:
    build = builder(oracle, getattr(torch, dtype))
    return DeepSpeedEngine(build, settings(oracle.role), config, NUM_STEPS, dtype)


def exactly_the_base(oracle: Oracle) -> list[float]:
    """Differences from a model of its own, after training and between two more steps. ZeRO-3 with both offloads."""
    engine = engine_of(oracle, case(3, True, True))
    head = HEADS[oracle.role][0]
    separate = DeepSpeedScorer(
        lambda: head.load(oracle.path, torch.float32), settings(oracle.role), case(3, False, False),
        OffloadConfig(), "float32",
    )  # fmt: skip
    reference, found = BaseScorer(engine), []
    for step in range(3):
        oracle.train(engine, [step])
        found.append(largest_difference(reference.score(oracle.scored), separate.score(oracle.scored)))
    found.append(largest_difference(reference.score(oracle.scored), engine.score(oracle.scored)))
    engine.engine.destroy()
    return found


def copied(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in engine.weights()}


def resumed(oracle: Oracle, folder: Path, config: ActorConfig, dtype: str) -> dict[str, float]:
    """Half the steps, a save, another engine and the other half: as far as straight through, and files of what size?"""
    straight = engine_of(oracle, config, dtype)
    oracle.train(straight, range(HALF))
    straight.save(folder)
    oracle.train(straight, range(HALF, NUM_STEPS))
    expected, adapter = copied(straight), {name: t.numel() for name, t in adapter_weights(straight)}
    straight.engine.destroy()
    other = engine_of(oracle, config, dtype)
    other.load(folder)
    oracle.train(other, range(HALF, NUM_STEPS))
    found = copied(other)
    other.engine.destroy()
    dist.barrier()
    return {
        "difference": largest_difference([found[name] for name in expected], expected.values()),
        "bytes": sum(f.stat().st_size for f in folder.rglob("*.pt")),
        "adapter": sum(adapter.values()),
    }


def states_of_one_step(oracle: Oracle) -> dict[str, int]:
    """Elements that this rank's optimizer steps and remembers. ZeRO-2: gradients and optimizer in parts."""
    engine = engine_of(oracle, case(2, False, False))
    oracle.train(engine, [0])
    counted = {component: 0 for component in (Component.master, Component.optimizer)}
    seen = set()
    for component, tensor in engine.tensors():
        if component in counted and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            counted[component] += tensor.numel()
    engine.engine.destroy()
    return {component.name: number for component, number in counted.items()}


def unmerged_against_merged(oracle: Oracle) -> float:
    """Scores of a plain model of the engine's weights against the engine's own, after training under ZeRO-3."""
    engine = engine_of(oracle, case(3, False, False))
    oracle.train(engine)
    head = settings(oracle.role).head
    plain = head.load(oracle.path, torch.float32)
    left = {tensor.name for tensor in checkpoint_tensors(plain)}
    own = dict(plain.named_parameters())
    for name, tensor in engine.weights():
        own[name].data.copy_(tensor)
        left.remove(name)
    if left:
        raise AssertionError(f"not handed out: {left}")
    from rlhf_mp.train.torch_engine import TorchScorer

    scorer = TorchScorer(plain, settings(oracle.role))
    difference = largest_difference(engine.score(oracle.scored), scorer.score(oracle.scored))
    engine.engine.destroy()
    return difference


def name_of(knobs: tuple[int, bool, bool]) -> str:
    return "stage {}, param_offload {}, optimizer_offload {}".format(*knobs)


def report_of(oracle: Oracle) -> dict:
    cases = CASES if oracle.role == "actor" else CRITIC_CASES
    measured = {name_of(knobs): worst(run_case(oracle, case(*knobs))) for knobs in cases}
    measured[f"{name_of(PACKED)}, packed"] = worst(run_case(oracle, case(*PACKED), packed=True))
    moves = {n: (oracle.weights[n] - start).abs().max().item() for n, start in oracle.checkpoint.items()}
    return {
        "cases": measured,
        "loss": oracle.trained["loss"],
        "moves": moves,
        "merged": unmerged_against_merged(oracle),
    }


def report_of_actor(oracle: Oracle, folder: Path) -> dict:
    """What is the same code for a critic, or asked of a policy alone."""
    quantized, eight_bit = (kind(oracle.role, oracle.path) for kind in (FourBitOracle, EightBitOracle))
    return {
        "quantized": {name_of(knobs): worst(run_case(quantized, case(*knobs))) for knobs in QUANTIZED_CASES},
        "quantized_loss": quantized.trained["loss"],
        "8 bits": worst(run_case(eight_bit, case(3, True, True))),
        "8-bit loss": eight_bit.trained["loss"],
        "base": exactly_the_base(oracle),
        "states": states_of_one_step(oracle),
        "resumed": {
            f"{name_of(knobs)}, {dtype}": worst(resumed(oracle, folder / f"{knobs}_{dtype}", case(*knobs), dtype))
            for knobs, dtype in RESUMED
        },
        "parameters": sum(p.numel() for p in oracle.weights.values()),
    }


def main(out: str, *models: str) -> None:
    """Writes what it found of ``role=path`` ..., by role."""
    init_distributed()
    folder = Path(out).parent / f"checkpoints_{dist.get_world_size()}"
    found = {}
    for model in models:
        oracle = AdapterOracle(*model.split("=", 1))
        found[oracle.role] = report_of(oracle)
        if oracle.role == "actor":
            found[oracle.role] |= report_of_actor(oracle, folder)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    leave_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
