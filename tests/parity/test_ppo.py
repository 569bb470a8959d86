"""PPO's whole update, advantages to weights, against a reference written out in loops, step for step."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from oracle import make_critic_checkpoint
from torchrun import on_ranks

from rlhf_mp.models.tiny import TinyShape, character_tokenizer, make_checkpoint

pytestmark = pytest.mark.engine
WORKER = Path(__file__).with_name("ppo_worker.py")
TOLERANCE = 1e-5
ZERO3 = {"deepspeed": {"param_persistence_threshold": 0}}
OFFLOADED = ZERO3 | {"fsdp_config": {"param_offload": True, "optimizer_offload": True}}
TP2, PP2 = ({"strategy": "megatron", "megatron": {f"{kind}_model_parallel_size": 2}} for kind in ("tensor", "pipeline"))
BACKENDS = {
    "torch": (1, {"strategy": "torch"}, {"strategy": "torch"}),
    "DeepSpeed, 1 rank": (1, ZERO3, ZERO3),
    "DeepSpeed, 2 ranks": (2, OFFLOADED, OFFLOADED),
    "Megatron TP2": (2, TP2, TP2),
    "Megatron PP2": (2, PP2, PP2),
    "DeepSpeed actor, Megatron TP2 critic": (2, ZERO3, TP2),
    "Megatron PP2 actor, DeepSpeed critic": (2, PP2, {"strategy": "deepspeed"} | OFFLOADED),
}
"""Ranks, and the backends of actor and critic."""


@pytest.fixture(scope="module", params=BACKENDS)
def report(request, tmp_path_factory) -> dict:
    num_ranks, actor, critic = BACKENDS[request.param]
    if "Megatron" in request.param and find_spec("mbridge") is None:
        pytest.skip("Megatron is not installed")
    folder = tmp_path_factory.mktemp("ppo")
    make_checkpoint(folder / "actor", character_tokenizer("0123456789+= "), TinyShape(64, 2, 4, 2, 16), std=0.1)
    make_critic_checkpoint(folder / "actor", folder / "critic")
    on_ranks(WORKER, num_ranks, folder, str(folder), json.dumps({"actor": actor, "critic": critic}))
    return json.loads((folder / "report.json").read_text())


def test_every_step_is_that_of_the_reference(report):
    first, *others = report["steps"]
    assert "actor/loss" not in first["found"] and "actor/loss" not in first["expected"]  # the critic's warm-up
    for step in report["steps"]:
        assert step["expected"] == {
            name: pytest.approx(step["found"][name], abs=TOLERANCE) for name in step["expected"]
        }
    assert len({step["expected"]["actor/loss"] for step in others}) == len(others)


def test_the_clips_had_a_say(report):
    """A test in which they never bind would not see them."""
    assert any(step["found"]["critic/clip_fraction"] > 0 for step in report["steps"])
    assert any(step["found"]["actor/clip_fraction"] > 0 for step in report["steps"][1:])


def test_all_weights_end_where_the_references_do(report):
    assert max(report["weights"].values()) <= TOLERANCE
