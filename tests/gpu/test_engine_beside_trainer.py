"""What only a GPU can show of an engine beside a trainer: memory shared by CUDA IPC, and memory that sleep gives back.

REHEARSE_GPU_TESTS=1 runs the same calls on a CPU, where there is nothing to give back.
"""

import os

import pytest
import torch
from server_parts import move, running, trainer

from rlhf_mp.config.schema import ModelConfig, RolloutConfig
from rlhf_mp.data.collate import collate
from rlhf_mp.errors import SyncError
from rlhf_mp.models.tiny import TinyShape, character_tokenizer, make_checkpoint
from rlhf_mp.rollout.served_adapter import plan_adapter
from rlhf_mp.rollout.sglang_client import EngineControl
from rlhf_mp.rollout.sglang_server import ServerPlan, SGLangServer
from rlhf_mp.train.adapted import adapter_weights
from rlhf_mp.weights.base import WeightSync
from rlhf_mp.weights.buckets import Packer
from rlhf_mp.weights.canary import make_canary
from rlhf_mp.weights.fleet import FixedRoster
from rlhf_mp.weights.swap import VerifiedSwap, whole_model
from rlhf_mp.weights.tensor import TensorTransport

REHEARSED = os.environ.get("REHEARSE_GPU_TESTS") == "1"
ON_GPU = torch.cuda.is_available() and not REHEARSED
pytestmark = [
    pytest.mark.engine,
    pytest.mark.gpu,
    pytest.mark.skipif(not (ON_GPU or REHEARSED), reason="needs a GPU (REHEARSE_GPU_TESTS=1: on a CPU all the same)"),
]
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SHAPE = TinyShape(hidden=512, layers=8, heads=8, kv_heads=4, head_dim=64, context=256)
UTILIZATION = 0.2
TOLERANCE = 0.05 if ON_GPU else 1e-4  # bfloat16, float32


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ModelConfig:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, character_tokenizer("0123456789+= "), SHAPE, std=0.04)
    return ModelConfig(str(path), lora_rank=8, lora_alpha=16)


def started(model: ModelConfig, folder, **options) -> SGLangServer:
    knobs = {"dtype": "bfloat16", "gpu_memory_utilization": UTILIZATION} if ON_GPU else {"dtype": "float32"}
    rollout = RolloutConfig(max_model_len=256, max_num_seqs=16, free_cache_engine=True, **knobs)
    plan = ServerPlan(index=0, model_path=model.path, on_cpu=not ON_GPU, gpus=(0,) if ON_GPU else (), seed=1)
    return SGLangServer(plan, rollout, context=256, log_file=folder / "engine.log", **options)


@pytest.fixture(scope="module", params=["whole", "adapter"])
def server(request, model, tmp_path_factory):
    options = {"adapter": plan_adapter(model)} if request.param == "adapter" else {}
    with running(started(model, tmp_path_factory.mktemp("engine"), **options)) as made:
        yield made


@pytest.fixture(scope="module")
def swap(server) -> VerifiedSwap:
    control = EngineControl("engine", server.address, timeout_s=120)
    transport = TensorTransport(1, gather=lambda own: [own], on_cpu=not ON_GPU)
    sync = WeightSync(
        transport,
        FixedRoster([control]),
        Packer(20 * 10**6, DEVICE, shared=transport.shared_buffers),
        dtype=torch.bfloat16 if ON_GPU else torch.float32,
        is_sender=True,
        workers_per_engine=1,
        base_stays=bool(server.address.adapter),
    )
    canary = make_canary(15, max_prompt=32, max_response=32, temperature=1.0, tolerance=TOLERANCE, seed=1)
    return VerifiedSwap(
        sync,
        canary,
        broadcast=lambda value: value,
        sleeps=True,
        free_bytes=(lambda: torch.cuda.mem_get_info()[0]) if ON_GPU else None,
        sent=adapter_weights if server.address.adapter else whole_model,
    )


@pytest.fixture(scope="module")
def actors(server, model):
    """Two versions."""
    own = model if server.address.adapter else None
    return [move(trainer(model.path, model=own, device=DEVICE), seed) for seed in (1, 2)]


def test_a_swap_reaches_the_engine_and_a_canary_of_other_weights_does_not_pass(swap, actors):
    for version, actor in enumerate(actors):
        metrics = swap.push(actor, version, must_differ=True)  # raises where the canary disagrees
        assert metrics["sync/bytes"][0] > 0
    (control,) = swap.sync.fleet.live
    sampled = [swap.canary.sample(control)]
    of_the_version_before = actors[0].score([collate(sampled)])[0]
    with pytest.raises(SyncError, match="canary"):
        swap.canary.check(["engine"], sampled, of_the_version_before, version=1)


def test_an_engine_that_sleeps_gives_its_memory_back_and_wakes_for_the_next_swap(swap, actors):
    """All but its base, where swaps bring an adapter."""
    swap.push(actors[0], 10, must_differ=False)
    metrics = swap.sleep()
    if ON_GPU:
        whole = torch.cuda.get_device_properties(0).total_memory
        assert metrics["sleep/freed_bytes"][0] > 0.7 * UTILIZATION * whole
    swap.push(actors[1], 11, must_differ=True)
