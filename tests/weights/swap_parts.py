"""Engines, transports and trainers that write down what a swap asks of them."""

import torch

from rlhf_mp.errors import EngineLost
from rlhf_mp.rollout.base import Completion
from rlhf_mp.rollout.sglang_client import EngineControl
from rlhf_mp.weights.base import WeightSync
from rlhf_mp.weights.buckets import Packer
from rlhf_mp.weights.canary import Canary
from rlhf_mp.weights.fleet import FixedRoster
from rlhf_mp.weights.swap import VerifiedSwap

CPU = torch.device("cpu")


class FakeEngine(EngineControl):
    """Writes down what it is asked, together with every other engine and the transport."""

    def __init__(self, name: str, events: list):
        self.name, self.events, self.version = name, events, -1
        self._given_back = set()

    def pause(self):
        self.events.append((self.name, "pause"))

    def resume(self):
        self.events.append((self.name, "resume"))

    def sleep(self, parts):
        self.events.append((self.name, "sleep"))
        self._given_back = set(parts)

    def wake(self, parts):
        if self._given_back.intersection(parts):
            self.events.append((self.name, "wake", *parts))
            self._given_back.difference_update(parts)

    def begin(self, payloads):
        self.events.append((self.name, "begin", len(payloads)))

    def commit(self, manifest_payloads, version):
        self.events.append((self.name, "commit", len(manifest_payloads), version))
        self.version = version
        return 0.25

    def sample(self, prompt_ids, num_tokens, temperature):
        self.events.append((self.name, "sample"))
        return Completion([5, 6], [-1.0, -2.0], "length", self.version)


class FakeTransport:
    shared_buffers = False

    def __init__(self, events: list, all_or_none: bool = False):
        self.events, self.connected, self.all_or_none = events, None, all_or_none

    def connect(self, fleet):
        self.connected = [engine.name for engine in fleet.live]

    def start(self, bucket):
        names, content = [slot.name for slot in bucket.slots], bucket.data.clone()
        self.events.append(("start", names))

        def wait():
            assert torch.equal(bucket.data, content)  # nobody writes to what is still being read
            self.events.append(("sent", names))

        return wait

    def finish(self):
        self.events.append(("finish",))

    def release(self):
        self.events.append(("release",))


def sync(events: list, *, engines: int = 1, dtype=torch.float32, is_sender: bool = True, **given) -> WeightSync:
    controls = [FakeEngine(f"engine {i}", events) for i in range(engines)]
    roster = FixedRoster(controls) if is_sender else None
    packer = Packer(80, CPU, shared=False)
    return WeightSync(
        FakeTransport(events), roster, packer, dtype=dtype, is_sender=is_sender, workers_per_engine=2, **given
    )


class Pool:
    """A roster that lets the swap go on without engines that are lost; one may come back for the next."""

    def __init__(self, engines: list[FakeEngine]):
        self.engines, self.size = engines, len(engines)
        self.reasons, self.settled = {}, []

    def targets(self):
        return [engine for engine in self.engines if engine.name not in self.reasons]

    def lost(self, engine, error):
        self.reasons[engine.name] = error.reason

    def settle(self, version, engines):
        self.settled.append((version, [engine.name for engine in engines]))

    def rest(self):
        self.settled.append("nothing")


def pooled(events: list, *, engines: int = 3, all_or_none: bool = False) -> tuple[WeightSync, Pool]:
    pool = Pool([FakeEngine(f"engine {i}", events) for i in range(engines)])
    transport = FakeTransport(events, all_or_none)
    packer = Packer(80, CPU, shared=False)
    return WeightSync(transport, pool, packer, dtype=torch.float32, is_sender=True, workers_per_engine=2), pool


def dies_in(engine: FakeEngine, name: str) -> None:
    def die(*args):
        raise EngineLost(engine.name, f"{name} failed: ConnectionError")

    setattr(engine, name, die)


def engines_of(made: WeightSync) -> list[EngineControl]:
    made.fleet.muster()
    return made.fleet.live


def weights(version: int, same=()) -> list[tuple[str, torch.Tensor]]:
    return [(f"w{i}", torch.full((5,), 1.0 if i in same else float(version))) for i in range(4)]


class Actor:
    """A trainer whose log-probs of any sample are given."""

    def __init__(self, logprobs: list[float]):
        self.logprobs = logprobs

    def weights(self):
        return iter(weights(1))

    def score(self, micro_batches):
        (batch,) = micro_batches
        return [torch.tensor([[0.0, *self.logprobs]] * len(batch.tokens))]


def verified(events: list, **given) -> VerifiedSwap:
    return VerifiedSwap(sync(events, **given), Canary([4], 2, 1.0, tolerance=0.01), broadcast=lambda value: value)
