"""One rung of ``benchmarks.memory``: a model of a size, two training steps, and the memory they took."""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from rlhf_mp.config.schema import ActorConfig
from rlhf_mp.data.collate import collate
from rlhf_mp.data.types import TokenBatch, Totals, Trajectory
from rlhf_mp.models.heads import PolicyHead
from rlhf_mp.observe.footprint import Footprint, planned_bytes
from rlhf_mp.observe.memory import GIB
from rlhf_mp.phase import Phase
from rlhf_mp.planner.hardware import Gpu
from rlhf_mp.planner.hf_config import shape_from_config
from rlhf_mp.planner.job import FP32, Batch, Job, TorchLayout
from rlhf_mp.planner.plan import Plan, make_plan
from rlhf_mp.planner.term import Role
from rlhf_mp.train.accumulate import ForwardSettings
from rlhf_mp.train.torch_engine import TorchEngine

VOCABULARY, LENGTH = 16384, 256


def main(case_text: str, out: str) -> None:
    case = json.loads(case_text)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = model_config(case["hidden"], case["layers"])
    shape = shape_from_config(config.to_dict(), "rung")
    card = this_card() if device.type == "cuda" else None
    job = Job(
        shape,
        TorchLayout(),
        Batch(case["tokens"], LENGTH, recompute="none"),
        card,
        algorithm="sft",
        precision=FP32,
        reference=False,
    )
    plan = make_plan(job)
    planned = planned_bytes(plan)["train_peak"]
    record = {"num_params": shape.num_params, "device": device.type, "planned_bytes": planned}
    limit = card.memory if card else case["limit"]
    if planned > limit:
        record["not_run"] = f"planned {planned / GIB:.1f} GiB, {limit / GIB:.1f} may be used"
    else:
        record |= measured(config, device, case["tokens"], plan)
    Path(out).write_text(json.dumps(record))


def this_card() -> Gpu:
    return Gpu("this", torch.cuda.get_device_properties(0).total_memory, 0, 0, 0, 0, "torch.cuda")


def model_config(hidden: int, layers: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
    )


def batch(tokens: int) -> TokenBatch:
    """Every token but the first is scored, so that all logits exist."""
    ids = torch.randint(2, VOCABULARY, (tokens // LENGTH, LENGTH), generator=torch.Generator().manual_seed(0)).tolist()
    own = LENGTH - 1
    return collate([Trajectory(row[:1], row[1:], [0.0] * own, [True] * own, 0.0, 0, 0, "stop") for row in ids])


def loss_fn(output, batch: TokenBatch, totals: Totals):
    return -(output.logprobs * batch.mask).sum() / totals.num_tokens, {}


def measured(config: Qwen3Config, device: torch.device, tokens: int, plan: Plan) -> dict[str, float]:
    """Bytes of tensors at the peak of the second step, and of the whole process."""
    settings = ForwardSettings(device, PolicyHead())
    engine = TorchEngine(AutoModelForCausalLM.from_config(config, dtype=torch.float32), settings, ActorConfig(), 2)
    footprint = Footprint({Role.actor: engine}, plan, device)
    for _ in range(2):
        with footprint.during(Phase.train):
            # two: gradients of the first are there while the second has its logits
            engine.train_step([batch(tokens)] * 2, Totals(2 * tokens, 2 * tokens // LENGTH), loss_fn)
    found = footprint.metrics()
    return {
        "measured_bytes": found["memory/train_peak_gib"] * GIB,
        "process_bytes": found["memory/rss_peak_gib"] * GIB,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
