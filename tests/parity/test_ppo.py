"""PPO's whole update, advantages to weights, against a reference written out in loops, step for step."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from oracle import make_critic_checkpoint

from rlhf_mp.cluster.bootstrap import LAUNCHER_ENV
from rlhf_mp.models.tiny import TinyShape, character_tokenizer, make_checkpoint

pytestmark = pytest.mark.engine
WORKER = Path(__file__).with_name("ppo_worker.py")
TOLERANCE = 1e-5
ZERO3 = {"deepspeed": {"param_persistence_threshold": 0}}
OFFLOADED = ZERO3 | {"fsdp_config": {"param_offload": True, "optimizer_offload": True}}
MEGATRON = {"strategy": "megatron"}
BACKENDS = {
    "torch": (1, {"strategy": "torch"}),
    "DeepSpeed, 1 rank": (1, ZERO3),
    "DeepSpeed, 2 ranks": (2, OFFLOADED),
    "Megatron TP2": (2, MEGATRON | {"megatron": {"tensor_model_parallel_size": 2}}),
    "Megatron PP2": (2, MEGATRON | {"megatron": {"pipeline_model_parallel_size": 2}}),
}


@pytest.fixture(scope="module", params=BACKENDS)
def report(request, tmp_path_factory) -> dict:
    num_ranks, backend = BACKENDS[request.param]
    if backend.get("strategy") == "megatron" and find_spec("mbridge") is None:
        pytest.skip("Megatron is not installed")
    folder = tmp_path_factory.mktemp("ppo")
    make_checkpoint(folder / "actor", character_tokenizer("0123456789+= "), TinyShape(64, 2, 4, 2, 16), std=0.1)
    make_critic_checkpoint(folder / "actor", folder / "critic")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_ENV}
    done = subprocess.run(
        [*launch, str(WORKER), str(folder), json.dumps(backend)],
        env=environment | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(WORKER.parents[2])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
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
