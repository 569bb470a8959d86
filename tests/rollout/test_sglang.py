"""A real SGLang server: its log-probs against the trainer's, before and after swaps, and swaps that must fail."""

import asyncio
import contextlib
import os
from pathlib import Path

import pytest
import torch
from server_parts import PROMPT, STOP, largest_difference, sample, sync_by_each_transport, trainer

from rlhf_mp.config.schema import ModelConfig
from rlhf_mp.data.collate import collate
from rlhf_mp.errors import SyncError
from rlhf_mp.rollout.base import SamplingParams
from rlhf_mp.rollout.sglang_client import EngineControl, SGLangClient
from rlhf_mp.train.torch_engine import TorchEngine
from rlhf_mp.weights.base import WeightSync
from rlhf_mp.weights.canary import make_canary

pytestmark = pytest.mark.engine
BUCKET_BYTES = 400_000  # several buckets for 3 MB of weights


@pytest.fixture(scope="module")
def changed(tiny_checkpoint) -> TorchEngine:
    """The trainer after it has moved every weight."""
    engine = trainer(tiny_checkpoint)
    generator = torch.Generator().manual_seed(7)
    for _, weight in engine.weights():
        weight.data.mul_(1 + 0.1 * torch.randn(weight.shape, generator=generator))
    return engine


@pytest.fixture(scope="module")
def control(sglang_server) -> EngineControl:
    return EngineControl("engine", sglang_server.address, timeout_s=60)


@pytest.fixture(scope="module")
def syncs(sglang_server, control, tmp_path_factory) -> dict[str, WeightSync]:
    return sync_by_each_transport(sglang_server, control, tmp_path_factory.mktemp("swap"), BUCKET_BYTES)


def test_the_key_of_a_server_is_on_no_command_line_and_in_no_log(sglang_server):
    group = os.getpgid(sglang_server.process.pid)
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if os.getpgid(int(process.name)) == group:
                lines.append((process / "cmdline").read_text())
    assert len(lines) >= 2  # the server and its workers
    assert sglang_server.address.key not in "\n".join([*lines, sglang_server.log_file.read_text()])


def test_logprobs_agree_with_the_trainer_before_any_swap(sglang_server, tiny_checkpoint):
    assert largest_difference(sglang_server, trainer(tiny_checkpoint)) <= 1e-4


def test_logprobs_are_after_temperature_on_both_sides(sglang_server, tiny_checkpoint):
    assert largest_difference(sglang_server, trainer(tiny_checkpoint, 0.6), temperature=0.6) <= 1e-4
    assert largest_difference(sglang_server, trainer(tiny_checkpoint, 1.0), temperature=0.6) > 0.1


def test_a_seed_fixes_its_response_whatever_else_is_in_the_batch(sglang_server):
    alone = sample(sglang_server, 1, seeds=[5])[0].ids
    together = [c.ids for c in sample(sglang_server, 4, seeds=[3, 9, 5, 11])]
    assert together[2] == alone
    assert len({tuple(ids) for ids in together}) == 4


NEIGHBOURS = {
    "greedy": {"temperature": 0.0, "sampling_seed": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.5, "sampling_seed": 3},
    "unseeded": {"temperature": 1.0},
}


@pytest.mark.parametrize("kind", list(NEIGHBOURS))
def test_a_seed_fixes_its_response_whatever_a_neighbour_asks_for(sglang_server, control, kind):
    """Evaluation and baselines are greedy, and the last of them may still be in the batch when responses begin."""
    wanted = {"max_new_tokens": 100, "ignore_eos": True} | NEIGHBOURS[kind]

    async def in_company(seeds: list[int]) -> list[list[int]]:
        client = SGLangClient("engine", sglang_server.address, timeout_s=60)
        neighbour = asyncio.create_task(
            asyncio.to_thread(control.call, "/generate", input_ids=[5, 6], sampling_params=wanted)
        )
        try:
            params = SamplingParams(1.0, 1.0, -1, 24, (STOP,))
            found = await asyncio.gather(*(client.generate(PROMPT, params, [seed]) for seed in seeds))
        finally:
            await client.close()
            answer = await neighbour
        assert len(answer["output_ids"]) == 100
        return [completion.ids for (completion,) in found]

    alone = [sample(sglang_server, 1, seeds=[seed])[0].ids for seed in range(5, 10)]
    assert asyncio.run(in_company(list(range(5, 10)))) == alone


def test_without_seeds_responses_differ(sglang_server):
    assert len({tuple(c.ids) for c in sample(sglang_server, 8, seeds=[None] * 8)}) > 4
    assert sample(sglang_server, 1, seeds=[None])[0].ids != sample(sglang_server, 1, seeds=[None])[0].ids


def test_responses_end_at_the_stop_token_or_at_the_limit(sglang_server):
    for completion in sample(sglang_server, 32):
        stopped = completion.ids[-1] == STOP
        assert completion.finish_reason == ("stop" if stopped else "length")
        assert STOP not in completion.ids[:-1] and len(completion.ids) <= 24
        assert len(completion.ids) == len(completion.logprobs)


VERSIONS = {"tensor": 10, "distributed": 20, "disk": 30}


@pytest.mark.parametrize("transport", list(VERSIONS))
def test_a_swap_by_each_transport_brings_exactly_the_new_weights(
    sglang_server, control, syncs, tiny_checkpoint, changed, transport
):
    sync, version = syncs[transport], VERSIONS[transport]
    original = trainer(tiny_checkpoint)

    sync.push(original.weights(), version, must_differ=False)
    assert largest_difference(sglang_server, original) <= 1e-4

    metrics = sync.push(changed.weights(), version + 1, must_differ=True)
    assert sample(sglang_server, 1)[0].version == version + 1
    assert largest_difference(sglang_server, changed) <= 1e-4
    assert largest_difference(sglang_server, original) > 0.1
    assert metrics["sync/bytes"][0] == 4 * sum(p.numel() for _, p in changed.weights())
    assert metrics["sync/verify_s"][0] > 0


@pytest.mark.parametrize("transport", list(VERSIONS))
def test_a_tensor_left_out_is_refused_by_name(syncs, changed, transport):
    without = [(n, p) for n, p in changed.weights() if n != "model.layers.2.mlp.up_proj.weight"]
    with pytest.raises(
        SyncError, match=r"version 99.*model\.layers\.2\.mlp\.up_proj\.weight is in the engine's checkpoint"
    ):
        syncs[transport].push(without, 99, must_differ=False)


@pytest.mark.parametrize("transport", list(VERSIONS))
def test_a_tensor_corrupted_on_the_way_is_refused_by_name(syncs, changed, transport, monkeypatch):
    sync = syncs[transport]
    start = sync.transport.start

    def flip_one_bit(bucket):
        if bucket.slots[0].name == "model.embed_tokens.weight":
            bucket.data[1000] ^= 1
        return start(bucket)

    monkeypatch.setattr(sync.transport, "start", flip_one_bit)
    with pytest.raises(SyncError, match=r"model\.embed_tokens\.weight: checksum"):
        sync.push(changed.weights(), 99, must_differ=False)


def test_a_bucket_sent_twice_is_refused(syncs, changed, monkeypatch):
    sync = syncs["tensor"]
    start = sync.transport.start
    monkeypatch.setattr(sync.transport, "start", lambda bucket: (start(bucket)(), start(bucket))[1])
    with pytest.raises(SyncError, match="arrived twice"):
        sync.push(changed.weights(), 99, must_differ=False)


def test_pushing_the_same_weights_after_an_optimizer_step_is_stale(syncs, changed):
    syncs["tensor"].push(changed.weights(), 40, must_differ=False)
    with pytest.raises(SyncError, match="version 41 equals version 40 bit for bit"):
        syncs["tensor"].push(changed.weights(), 41, must_differ=True)


def test_the_canary_agrees_after_a_good_swap_and_catches_stale_weights(syncs, control, tiny_checkpoint, changed):
    original = trainer(tiny_checkpoint)
    canary = make_canary(32, max_prompt=16, max_response=32, temperature=1.0, tolerance=1e-4, seed=1)

    def check(engine: TorchEngine) -> None:
        sampled = [canary.sample(control)]
        canary.check(["engine"], sampled, engine.score([collate(sampled)])[0], version=50)

    syncs["tensor"].push(changed.weights(), 50, must_differ=False)
    check(changed)
    with pytest.raises(SyncError, match=r"log-probs of its own sample differ from the trainer's by .*canary_tolerance"):
        check(original)  # the trainer has moved on, the engine has not


@pytest.mark.parametrize(
    ("transport", "quantization"),
    [*((name, None) for name in VERSIONS), ("tensor", "nf4"), ("tensor", "int8")],
    ids=str,
)
def test_an_adapter_reaches_the_engine_merged(sglang_server, control, syncs, tiny_checkpoint, transport, quantization):
    model = ModelConfig(str(tiny_checkpoint), lora_rank=4, lora_alpha=12, quantization=quantization)
    engine = trainer(tiny_checkpoint, model=model)
    sync, version = syncs[transport], VERSIONS[transport] + 5
    sync.push(engine.weights(), version, must_differ=False)
    assert largest_difference(sglang_server, engine) <= 1e-4
    whole_base = largest_difference(sglang_server, trainer(tiny_checkpoint))  # an adapter begins as nothing
    assert whole_base <= 1e-4 if quantization is None else whole_base > {"nf4": 0.1, "int8": 1e-3}[quantization]

    generator = torch.Generator().manual_seed(5)
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    sync.push(engine.weights(), version + 1, must_differ=True)
    assert largest_difference(sglang_server, engine) <= 1e-4
    assert largest_difference(sglang_server, trainer(tiny_checkpoint)) > 0.1
    canary = make_canary(32, max_prompt=16, max_response=32, temperature=1.0, tolerance=1e-4, seed=1)
    sampled = [canary.sample(control)]
    canary.check(["engine"], sampled, engine.score([collate(sampled)])[0], version=version + 1)


def test_a_swap_works_again_after_a_refused_one(sglang_server, syncs, changed):
    syncs["tensor"].push(changed.weights(), 60, must_differ=False)
    assert sample(sglang_server, 1)[0].version == 60
    assert largest_difference(sglang_server, changed) <= 1e-4
