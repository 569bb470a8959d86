"""A swap while a real server samples: every token's log-prob is that of the version it carries, and none is lost."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
import torch

from rlhf_mp.config.schema import ActorConfig
from rlhf_mp.data.collate import collate
from rlhf_mp.data.types import Trajectory
from rlhf_mp.models.heads import PolicyHead
from rlhf_mp.models.hf import load_causal_lm
from rlhf_mp.rollout.base import Completion, SamplingParams
from rlhf_mp.rollout.sglang_client import EngineControl, SGLangClient
from rlhf_mp.rollout.stragglers import first_complete
from rlhf_mp.train.accumulate import ForwardSettings
from rlhf_mp.train.torch_engine import TorchEngine
from rlhf_mp.weights.base import Transport, WeightSync
from rlhf_mp.weights.buckets import Packer
from rlhf_mp.weights.disk import DiskTransport
from rlhf_mp.weights.distributed import DistributedTransport
from rlhf_mp.weights.fleet import FixedRoster
from rlhf_mp.weights.tensor import TensorTransport

pytestmark = pytest.mark.engine
CPU = torch.device("cpu")
PROMPTS = [[4, 9, 12, 6, 7, 13], [5, 5, 8]]
NUM_TOKENS = 100  # of a context of 128
SEEDS = [3, 4, 5, 6]
STOP = 1
PARAMS = SamplingParams(temperature=0.8, top_p=1.0, top_k=-1, max_new_tokens=NUM_TOKENS, stop_token_ids=(STOP,))


@pytest.fixture(scope="module")
def trainers(tiny_checkpoint) -> dict[int, TorchEngine]:
    """Three versions of the weights, clearly apart."""
    made = {}
    for version in (5, 6, 7):
        settings = ForwardSettings(CPU, PolicyHead(PARAMS.temperature))
        made[version] = TorchEngine(load_causal_lm(str(tiny_checkpoint), torch.float32), settings, ActorConfig(), 1)
        generator = torch.Generator().manual_seed(version)
        for _, weight in made[version].weights():
            weight.data.mul_(1 + 0.1 * torch.randn(weight.shape, generator=generator))
    return made


def sync_by(transport: Transport, server) -> WeightSync:
    return WeightSync(
        transport,
        FixedRoster([EngineControl("engine", server.address, timeout_s=60)]),
        Packer(10**7, CPU, shared=transport.shared_buffers),
        dtype=torch.float32,
        is_sender=True,
        workers_per_engine=server.workers,
    )


@pytest.fixture(scope="module")
def sync(sglang_server) -> WeightSync:
    return sync_by(TensorTransport(sglang_server.workers, gather=lambda own: [own], on_cpu=True), sglang_server)


def sample_while(server, meanwhile) -> list[list[Completion]]:
    """All groups at once, with something going on in another thread."""

    async def run():
        client = SGLangClient("engine", server.address, timeout_s=120)
        try:
            return await asyncio.gather(*(client.generate(prompt, PARAMS, SEEDS) for prompt in PROMPTS))
        finally:
            await client.close()

    other = threading.Thread(target=meanwhile)
    other.start()
    found = asyncio.run(run())
    other.join()
    return found


def seconds_of_sampling(server) -> float:
    """All groups when nothing goes on meanwhile, on this machine, now."""
    start = time.monotonic()
    sample_while(server, lambda: None)
    return time.monotonic() - start


def logprobs_of(trainer: TorchEngine, prompt: list[int], ids: list[int]) -> torch.Tensor:
    row = Trajectory(prompt, ids, [0.0] * len(ids), [True] * len(ids), 0.0, 0, 0, "length")
    return trainer.score([collate([row])])[0][0, len(prompt) :]


def test_each_token_has_the_logprob_of_the_version_it_carries(sglang_server, sync, trainers):
    sync.push(trainers[5].weights(), 5, must_differ=False)
    paused: list[float] = []

    took_s = seconds_of_sampling(sglang_server)

    def swap_twice():
        for version in (6, 7):
            time.sleep(took_s / 3)
            start = time.monotonic()
            sync.push(trainers[version].weights(), version, must_differ=True)
            paused.append(time.monotonic() - start)

    groups = sample_while(sglang_server, swap_twice)
    seen = set()
    for prompt, completions in zip(PROMPTS, groups, strict=True):
        for c in completions:
            assert len(c.ids) == len(c.logprobs) == len(c.versions)
            assert STOP not in c.ids[:-1] and c.finish_reason == ("stop" if c.ids[-1] == STOP else "length")
            assert c.finish_reason == "stop" or len(c.ids) == NUM_TOKENS
            assert c.versions == sorted(c.versions) and c.version == c.versions[0]
            seen |= {tuple(sorted(set(c.versions)))}
            scored = {version: logprobs_of(trainer, prompt, c.ids) for version, trainer in trainers.items()}
            own = torch.tensor([scored[version][i] for i, version in enumerate(c.versions)])
            torch.testing.assert_close(torch.tensor(c.logprobs), own, atol=1e-4, rtol=0)
            others = torch.stack(list(scored.values()))
            assert (others[0] - others[1]).abs().mean() > 0.01  # or agreement would prove nothing
    assert any(len(versions) > 1 for versions in seen), f"no swap came in the middle of a response: {seen}"
    assert max(paused) < 5


def test_a_swap_to_the_same_weights_changes_no_token(sglang_server, sync, trainers):
    """Seeds draw by position: an interrupted response goes on with what would have come."""
    sync.push(trainers[5].weights(), 8, must_differ=False)
    straight = sample_while(sglang_server, lambda: None)
    took_s = seconds_of_sampling(sglang_server)

    def swap():
        time.sleep(took_s / 3)
        sync.push(trainers[5].weights(), 9, must_differ=False)

    interrupted = sample_while(sglang_server, swap)
    assert {v for group in interrupted for c in group for v in c.versions} == {8, 9}
    for one, other in zip(straight, interrupted, strict=True):
        assert [c.ids for c in one] == [c.ids for c in other]


def test_an_aborted_straggler_leaves_the_engine_and_disturbs_nobody(sglang_server, sync, trainers):
    sync.push(trainers[5].weights(), 10, must_differ=False)

    async def run():
        client = SGLangClient("engine", sglang_server.address, timeout_s=120)
        long = SamplingParams(0.8, 1.0, -1, 110, (STOP,))
        short = SamplingParams(0.8, 1.0, -1, 2, (STOP,))
        try:
            calls = [client.generate(PROMPTS[0], long, list(range(32))), client.generate(PROMPTS[1], short, [1])]
            found = await first_complete(calls, 1)
            deadline = time.monotonic() + 20
            while client._aborts and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            start = time.monotonic()
            again = await client.generate(PROMPTS[1], short, [1])
            return found, again, client._aborts, time.monotonic() - start
        finally:
            await client.close()

    found, again, left, _ = asyncio.run(run())
    assert list(found) == [1] and found[1][0].ids == again[0].ids and not left
    # all of them are gone: a pause has nothing to wait for
    start = time.monotonic()
    sync.fleet.each(lambda engine: engine.pause())
    assert time.monotonic() - start < 2
    sync.fleet.each(lambda engine: engine.resume())


def test_a_server_that_has_slept_samples_from_what_the_next_swap_brings(sglang_server, sync, trainers):
    """On a CPU there is no memory to give back: this is what is asked of a server, and that it answers well after."""
    sync.push(trainers[5].weights(), 5, must_differ=False)
    took_s = seconds_of_sampling(sglang_server)

    def sleep_and_swap():
        time.sleep(took_s / 3)
        sync.sleep()  # in the middle of responses: they are given up, and go on afterwards
        sync.push(trainers[6].weights(), 6, must_differ=True)

    groups = sample_while(sglang_server, sleep_and_swap)
    versions = set()
    for prompt, completions in zip(PROMPTS, groups, strict=True):
        for c in completions:
            versions |= set(c.versions)
            scored = {version: logprobs_of(trainers[version], prompt, c.ids) for version in (5, 6)}
            own = torch.tensor([scored[version][i] for i, version in enumerate(c.versions)])
            torch.testing.assert_close(torch.tensor(c.logprobs), own, atol=1e-4, rtol=0)
    assert versions == {5, 6}


def test_a_worker_that_reads_later_than_the_first_still_finds_the_weights_on_disk(
    sglang_server, trainers, tmp_path, monkeypatch
):
    """The first worker answers for its engine, so its answer says nothing of the others."""
    workers = [p for p in psutil.Process(sglang_server.process.pid).children(recursive=True) if is_worker(p)]
    assert len(workers) == sglang_server.workers
    disk = DiskTransport(tmp_path / "weights", is_sender=True)
    finish = disk.finish

    def finish_while_others_are_slow():
        with contextlib.ExitStack() as slowed:
            for worker in workers[1:]:
                slowed.enter_context(slow(worker))
            finish()
            time.sleep(0.2)

    monkeypatch.setattr(disk, "finish", finish_while_others_are_slow)
    sync_by(disk, sglang_server).push(trainers[6].weights(), 8, must_differ=False)
    assert not (tmp_path / "weights").exists()
    for prompt, completions in zip(PROMPTS, sample_while(sglang_server, lambda: None), strict=True):
        for c in completions:
            scored = logprobs_of(trainers[6], prompt, c.ids)
            torch.testing.assert_close(torch.tensor(c.logprobs), scored, atol=1e-4, rtol=0)


def is_worker(process: psutil.Process) -> bool:
    return "scheduler" in " ".join(process.cmdline())


@contextlib.contextmanager
def slow(process: psutil.Process) -> Iterator[None]:
    """It gets a twentieth of its time."""
    over = threading.Event()

    def brake():
        while not over.wait(0.001):
            process.suspend()
            time.sleep(0.02)
            process.resume()

    thread = threading.Thread(target=brake)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_rank_that_torchrun_started_can_broadcast(sglang_server, sync, trainers, monkeypatch):
    """For it, torch takes any address of a group for that of a store which torchrun holds, and waits to be let in."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    broadcast = sync_by(
        DistributedTransport(sglang_server.workers, "127.0.0.1", on_cpu=True, timeout_s=30), sglang_server
    )
    broadcast.push(trainers[7].weights(), 7, must_differ=False)
    for prompt, completions in zip(PROMPTS, sample_while(sglang_server, lambda: None), strict=True):
        for c in completions:
            assert set(c.versions) == {7}
            scored = logprobs_of(trainers[7], prompt, c.ids)
            torch.testing.assert_close(torch.tensor(c.logprobs), scored, atol=1e-4, rtol=0)
