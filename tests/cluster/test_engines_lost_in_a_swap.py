"""Two real servers, a real swap, and one of them killed in the middle of it, by each transport."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator

import pytest
import torch

from rlhf_mp.cluster.engine_host import EngineHost
from rlhf_mp.cluster.engine_pool import EnginePool, Rules
from rlhf_mp.cluster.placement import place
from rlhf_mp.cluster.processes import alive_in_group
from rlhf_mp.cluster.shared_memory import remove_named, untidy_files
from rlhf_mp.config.load import config_from_dict
from rlhf_mp.config.schema import ActorConfig
from rlhf_mp.models.heads import PolicyHead
from rlhf_mp.models.hf import load_causal_lm
from rlhf_mp.rollout.base import SamplingParams
from rlhf_mp.rollout.sglang_client import EngineControl, SGLangClient
from rlhf_mp.train.accumulate import ForwardSettings
from rlhf_mp.train.torch_engine import TorchEngine
from rlhf_mp.weights.base import WeightSync
from rlhf_mp.weights.buckets import Packer
from rlhf_mp.weights.canary import make_canary
from rlhf_mp.weights.disk import DiskTransport
from rlhf_mp.weights.distributed import DistributedTransport
from rlhf_mp.weights.swap import VerifiedSwap
from rlhf_mp.weights.tensor import TensorTransport

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
CPU = torch.device("cpu")
BUCKET_BYTES = 400_000  # several buckets for 3 MB of weights
PARAMS = SamplingParams(1.0, 1.0, -1, 8, (1,))


class LocalRoster:
    """A pool whose event loop runs in a thread beside the test."""

    size = 2

    def __init__(self, pool: EnginePool, loop: asyncio.AbstractEventLoop):
        self.pool, self.loop, self.known = pool, loop, {}

    def call(self, act):
        async def do():
            return act()

        return asyncio.run_coroutine_threadsafe(do(), self.loop).result(60)

    def targets(self):
        for target in self.call(self.pool.targets):
            name = f"SGLang engine {target.index}"
            self.known.setdefault(target, EngineControl(name, target.address, 20, index=target.index, prompt_s=10))
        return [self.known[target] for target in self.call(self.pool.targets)]

    def target_of(self, engine):
        return next(target for target, control in self.known.items() if control is engine)

    def lost(self, engine, error):
        target = self.target_of(engine)
        self.call(lambda: self.pool.lost(target.index, target.start, error.reason))

    def settle(self, version, engines):
        self.call(lambda: self.pool.settle(version, [self.target_of(engine) for engine in engines]))


class Cluster:
    def __init__(self, tiny_checkpoint, logs):
        tree = {
            "data": {"train_files": "train.jsonl", "max_prompt_length": 64, "max_response_length": 64},
            "actor_rollout_ref": {
                "model": {"path": str(tiny_checkpoint), "dtype": "float32"},
                "rollout": {"max_num_seqs": 8, "num_engines": 2, "max_model_len": 128},
            },
            "trainer": {"n_gpus_per_node": 2, "device": "cpu"},
        }
        config = config_from_dict(tree)
        self.mapped: set[str] = set()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        # servers end with the thread that starts them
        self.hosts = [self.run(self.made(plan, config, logs)) for plan in place(config, on_cpu=True).servers]
        addresses = [self.run(host.ready()) for host in self.hosts]
        self.pool = EnginePool(Rules(9, 5, 10), lambda name, address: SGLangClient(name, address, 30))
        self.roster = LocalRoster(self.pool, self.loop)
        self.roster.call(lambda: self.pool.adopt(self.hosts, addresses))

    def end(self) -> None:
        self.run(self.forget())  # or the pool would replace them
        for host in self.hosts:
            host.server.kill()
        remove_named(self.mapped)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    async def forget(self) -> None:
        """Everything that the pool does and waits for."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(member.client.close() for member in self.pool.members if member.client))

    async def made(self, *args) -> EngineHost:
        return EngineHost(*args, "127.0.0.1")

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(180)

    def kill(self, index: int, name: str = "SIGKILL") -> None:
        group = self.hosts[index].server.process.pid
        self.mapped |= untidy_files(alive_in_group(group))  # in a job its guard knows them
        os.killpg(group, getattr(signal, name))

    def versions(self, num: int = 8) -> set[int]:
        """Of some groups, all sampled at once."""

        async def sample():
            groups = [self.pool.run(2, lambda engine: engine.generate([4, 9], PARAMS, [1, 2])) for _ in range(num)]
            return {completion.version for found in await asyncio.gather(*groups) for completion in found}

        return self.run(sample())

    async def all_answer(self) -> None:
        while any(member.client is None for member in self.pool.members):
            await asyncio.sleep(0.1)

    def live(self) -> list[int]:
        return self.roster.call(lambda: [member.index for member in self.pool.members if member.version is not None])


@pytest.fixture(scope="module")
def cluster(tiny_checkpoint, tmp_path_factory) -> Iterator[Cluster]:
    made = Cluster(tiny_checkpoint, tmp_path_factory.mktemp("logs"))
    yield made
    made.end()


@pytest.fixture(scope="module")
def actor(tiny_checkpoint) -> TorchEngine:
    settings = ForwardSettings(CPU, PolicyHead(1.0))
    return TorchEngine(load_causal_lm(str(tiny_checkpoint), torch.float32), settings, ActorConfig(), num_steps=1)


def moved(actor: TorchEngine, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _, weight in actor.weights():
        weight.data.mul_(1 + 0.02 * torch.randn(weight.shape, generator=generator))


def swap_by(name: str, roster: LocalRoster, folder) -> VerifiedSwap:
    transport = {
        "tensor": lambda: TensorTransport(1, gather=lambda own: [own], on_cpu=True),
        "distributed": lambda: DistributedTransport(1, "127.0.0.1", on_cpu=True, timeout_s=20),
        "disk": lambda: DiskTransport(folder / "weights", is_sender=True),
    }[name]()
    packer = Packer(BUCKET_BYTES, CPU, shared=transport.shared_buffers)
    sync = WeightSync(transport, roster, packer, dtype=torch.float32, is_sender=True, workers_per_engine=1)
    canary = make_canary(32, max_prompt=16, max_response=32, temperature=1.0, tolerance=1e-4, seed=1)
    return VerifiedSwap(sync, canary, broadcast=lambda value: value)


VERSIONS = {"tensor": 10, "distributed": 20, "disk": 30}


@pytest.mark.parametrize(
    "transport", ["tensor", *(pytest.param(name, marks=pytest.mark.long) for name in ("distributed", "disk"))]
)
def test_one_of_two_killed_in_the_middle_is_left_out_restarted_and_joins_at_the_next_swap(
    cluster, actor, tmp_path, monkeypatch, transport
):
    version = VERSIONS[transport]
    cluster.run(cluster.all_answer())
    swap = swap_by(transport, cluster.roster, tmp_path)
    swap.push(actor, version, must_differ=False)
    assert cluster.live() == [0, 1] and cluster.versions() == {version}

    start, buckets = swap.sync.transport.start, []

    def kill_at_the_second(bucket):
        buckets.append(bucket)
        if len(buckets) == 2:
            cluster.kill(1)
        return start(bucket)

    monkeypatch.setattr(swap.sync.transport, "start", kill_at_the_second)
    moved(actor, version)
    swap.push(actor, version + 1, must_differ=True)  # with its proofs: checksums of every tensor, and the canary
    assert cluster.live() == [0] and cluster.versions() == {version + 1}

    cluster.run(cluster.all_answer())
    assert cluster.live() == [0] and cluster.versions() == {version + 1}  # the other one has the first weights
    moved(actor, version + 1)
    swap.push(actor, version + 2, must_differ=True)
    assert cluster.live() == [0, 1] and cluster.versions() == {version + 2}


@pytest.mark.long
def test_an_engine_that_hangs_when_a_swap_begins_is_left_out(cluster, actor, tmp_path):
    cluster.run(cluster.all_answer())
    swap = swap_by("tensor", cluster.roster, tmp_path)
    swap.push(actor, 50, must_differ=False)
    cluster.kill(0, "SIGSTOP")
    moved(actor, 50)
    swap.push(actor, 51, must_differ=True)
    assert cluster.live() == [1] and cluster.versions() == {51}
    cluster.run(cluster.all_answer())
    swap.push(actor, 51, must_differ=False)  # the same version again, for the one that came back
    assert cluster.live() == [0, 1] and cluster.versions() == {51}


def test_what_nobody_serves_is_served_after_the_same_version_is_pushed_again(cluster, actor, tmp_path):
    cluster.run(cluster.all_answer())
    swap = swap_by("tensor", cluster.roster, tmp_path)
    swap.push(actor, 60, must_differ=False)
    for index in range(2):
        cluster.kill(index)
    sampling = asyncio.run_coroutine_threadsafe(
        cluster.pool.run(2, lambda engine: engine.generate([4, 9], PARAMS, [1, 2])), cluster.loop
    )
    cluster.run(cluster.pool.swap_needed())
    assert not sampling.done()
    swap.push(actor, 60, must_differ=False)
    assert {completion.version for completion in sampling.result(60)} == {60}
