"""A real SGLang server that serves an adapter: a swap brings the adapter alone, and is verified like any other."""

from pathlib import Path

import pytest
from server_parts import largest_difference, move, running, sample, sync_by_each_transport, trainer

from rlhf_mp.config.schema import ModelConfig, RolloutConfig
from rlhf_mp.data.collate import collate
from rlhf_mp.errors import SyncError
from rlhf_mp.models.merge import adapter_tensors
from rlhf_mp.rollout.served_adapter import plan_adapter
from rlhf_mp.rollout.sglang_client import EngineControl
from rlhf_mp.rollout.sglang_server import ServerPlan, SGLangServer
from rlhf_mp.train.adapted import adapter_weights
from rlhf_mp.train.torch_engine import TorchEngine
from rlhf_mp.weights.base import WeightSync
from rlhf_mp.weights.canary import make_canary

pytestmark = pytest.mark.engine
VERSIONS = {"tensor": 10, "distributed": 20, "disk": 30}
BUCKET_BYTES = 50_000  # several


@pytest.fixture(scope="module")
def model(tiny_checkpoint) -> ModelConfig:
    return ModelConfig(str(tiny_checkpoint), lora_rank=4, lora_alpha=12)


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def server(request, model, tmp_path_factory):
    log = tmp_path_factory.mktemp("adapter") / "engine.log"
    rollout = RolloutConfig(
        dtype="float32", max_model_len=128, max_num_seqs=64, tensor_model_parallel_size=request.param
    )
    plan = ServerPlan(index=0, model_path=model.path, on_cpu=True, gpus=(), seed=1)
    made = SGLangServer(plan, rollout, context=128, log_file=log, adapter=plan_adapter(model))
    with running(made, request.param) as started:
        yield started


@pytest.fixture(scope="module")
def control(server) -> EngineControl:
    return EngineControl("engine", server.address, timeout_s=60)


@pytest.fixture(scope="module")
def syncs(server, control, tmp_path_factory) -> dict[str, WeightSync]:
    return sync_by_each_transport(server, control, tmp_path_factory.mktemp("swap"), BUCKET_BYTES)


def moved(model: ModelConfig, seed: int) -> TorchEngine:
    return move(trainer(Path(model.path), model=model), seed)


def test_what_the_engine_expects_is_what_the_trainer_has(model):
    sent = [stored.name for stored in adapter_tensors(trainer(Path(model.path), model=model).module)]
    assert sorted(sent) == sorted(plan_adapter(model).tensors)
    assert len(sent) == 2 * 7 * 4  # A and B of seven matrices in each of four layers


def test_before_a_swap_it_is_the_base(server, model):
    assert largest_difference(server, trainer(Path(model.path))) <= 1e-4


@pytest.mark.parametrize("transport", list(VERSIONS))
def test_a_swap_brings_the_adapter_and_nothing_else(server, control, syncs, model, transport):
    sync, version = syncs[transport], VERSIONS[transport]
    for step in (0, 1):  # the second replaces one that has been sampled from
        engine = moved(model, version + step)
        metrics = sync.push(adapter_weights(engine), version + step, must_differ=True)
        assert sample(server, 1)[0].version == version + step
        assert largest_difference(server, engine) <= 1e-4
        assert largest_difference(server, trainer(Path(model.path))) > 0.1
    own = sum(p.numel() for p in engine.module.parameters() if p.requires_grad)
    assert metrics["sync/bytes"][0] == 4 * own < 4 * sum(p.numel() for p in engine.module.parameters()) / 10
    canary = make_canary(32, max_prompt=16, max_response=32, temperature=1.0, tolerance=1e-4, seed=1)
    sampled = [canary.sample(control)]
    canary.check(["engine"], sampled, engine.score([collate(sampled)])[0], version=version + 1)


@pytest.mark.parametrize("transport", list(VERSIONS))
def test_an_adapter_that_is_not_whole_is_refused_by_name_and_the_old_one_stays(server, syncs, model, transport):
    sync, old, new = syncs[transport], moved(model, 1), moved(model, 2)
    sync.push(adapter_weights(old), 50, must_differ=False)
    missing = "base_model.model.model.layers.2.mlp.up_proj.lora_B.weight"
    without = [(name, tensor) for name, tensor in adapter_weights(new) if name != missing]
    with pytest.raises(SyncError, match=rf"version 51.*{missing} is in the engine's checkpoint but was not sent"):
        sync.push(without, 51, must_differ=False)
    sync.fleet.each(lambda engine: engine.resume())
    assert largest_difference(server, old) <= 1e-4


def test_a_server_that_has_slept_still_has_its_base(server, syncs, model):
    """On a CPU there is no memory to give back: this is what is asked of a server, and that it answers well after."""
    engine, sync = moved(model, 3), syncs["tensor"]
    sync.push(adapter_weights(moved(model, 1)), 60, must_differ=False)
    sync.sleep()
    sync.push(adapter_weights(engine), 61, must_differ=True)
    assert largest_difference(server, engine) <= 1e-4
