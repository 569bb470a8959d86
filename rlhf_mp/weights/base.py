"""One swap: every engine gets every tensor of one version, or the swap is an error (R4)."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rlhf_mp.data.types import Sums
from rlhf_mp.errors import SyncError
from rlhf_mp.rollout.sglang_client import BESIDE_WEIGHTS, WEIGHTS, EngineControl
from rlhf_mp.weights.buckets import Bucket, Packer
from rlhf_mp.weights.encoding import encode
from rlhf_mp.weights.fleet import FixedRoster, Fleet, Roster
from rlhf_mp.weights.manifest import Manifest, TensorRecord


class Transport(Protocol):
    """Moves bytes into the engines' models. ``start`` is collective; the others run on the sending rank only."""

    shared_buffers: bool  # buckets must lie where another process can map them
    all_or_none: bool  # where one engine is lost, what the others got is spoilt too, and must be sent again

    def connect(self, fleet: Fleet) -> None:
        """Before the first bucket of a version: these engines get it."""
        ...

    def start(self, bucket: Bucket) -> Callable[[], None]:
        """Begin to send; the result, collective too, waits until no engine reads ``bucket`` any more."""
        ...

    def finish(self) -> None:
        """After the last bucket of a version. An engine may answer as soon as its first worker has loaded it."""
        ...

    def release(self) -> None:
        """Every worker of every engine has said what arrived: nobody reads this version any more."""
        ...


@dataclass
class SyncTimes:
    """Seconds of one swap on the sending rank. What waiting hides behind gathering is in neither."""

    gather_s: float = 0.0  # gathering and casting weights into buckets
    wait_s: float = 0.0  # for engines that still load the bucket before
    verify_s: float = 0.0
    engine_verify_s: float = 0.0  # of the slowest engine, which works while this rank does
    bytes: int = 0
    changed_fraction: float = 1.0  # of the tensors, since the version before


class WeightSync:
    """Pushes the trainer's weights into all engines and proves that they arrived."""

    def __init__(
        self,
        transport: Transport,
        roster: Roster | None,
        packer: Packer,
        *,
        dtype: torch.dtype,
        is_sender: bool,
        workers_per_engine: int,
        base_stays: bool = False,
    ):
        """
        Args:
            roster: None on ranks that do not send.
            base_stays: in engines, for good, as pushes bring an adapter to it.
        """
        self.transport, self.packer = transport, packer
        self.fleet = Fleet(roster or FixedRoster([]))
        self.dtype, self.is_sender = dtype, is_sender
        self._workers = workers_per_engine
        self._slept_off = BESIDE_WEIGHTS if base_stays else (*WEIGHTS, *BESIDE_WEIGHTS)
        self._previous: Manifest | None = None
        self.whole = True  # False: the last push broke off, because an engine was lost, and must be done again

    def push(self, weights: Iterable[tuple[str, Tensor]], version: int, *, must_differ: bool) -> Sums:
        """Collective. When it returns, every engine that is left holds exactly ``version`` and samples from it.

        Args:
            must_differ: the trainer has changed its weights since the last push; equal ones would be stale.

        Raises:
            SyncError: something is missing, different, or stale.
            EngineError: an engine refused, or is lost and the run cannot do without it.
        """
        times, records = SyncTimes(), []
        start = time.perf_counter()
        self._begin()
        # Three stages at once: bucket k + 1 is gathered and its checksums computed while bucket k travels and loads.
        sent = None
        for bucket in self._gathered(weights, times):
            times.bytes += bucket.data.numel()
            records += self._records(bucket, times)
            if sent:
                self._wait(sent, times)
            sent = self.transport.start(bucket)
        if sent:
            self._wait(sent, times)
        if self.is_sender:
            self.transport.finish()
            self.whole = not (self.transport.all_or_none and self.fleet.num_lost)
            if self.whole:
                self._commit(Manifest(version, tuple(records)), times, must_differ)
                self.fleet.each(self._resume)
        return self._metrics(times, time.perf_counter() - start)

    def sleep(self) -> None:
        """Every engine gives its memory back, until the next push."""
        if self.is_sender:
            self.fleet.muster()
            self.fleet.rest()
            self.fleet.each(lambda engine: engine.pause())
            self.fleet.each(lambda engine: engine.sleep(self._slept_off))

    def _resume(self, engine: EngineControl) -> None:
        engine.wake(BESIDE_WEIGHTS)  # only now: until here the trainer has had the memory of the KV cache
        engine.resume()

    def _begin(self) -> None:
        if not self.is_sender:
            return
        self.fleet.muster()
        self.fleet.each(lambda engine: engine.pause())
        self.fleet.each(lambda engine: engine.wake(WEIGHTS))
        self.transport.connect(self.fleet)
        self.fleet.each(lambda engine: engine.begin(self._encoded({})))

    def _gathered(self, weights: Iterable[tuple[str, Tensor]], times: SyncTimes) -> Iterator[Bucket]:
        buckets = self.packer.pack(weights, self.dtype)
        while True:
            start = time.perf_counter()
            bucket = next(buckets, None)
            times.gather_s += time.perf_counter() - start
            if bucket is None:
                return
            yield bucket

    def _wait(self, sent: Callable[[], None], times: SyncTimes) -> None:
        start = time.perf_counter()
        sent()
        times.wait_s += time.perf_counter() - start

    def _records(self, bucket: Bucket, times: SyncTimes) -> Iterator[TensorRecord]:
        if not self.is_sender:
            return
        start = time.perf_counter()
        for name, tensor in bucket.tensors():
            yield TensorRecord.of(name, tensor)
        times.verify_s += time.perf_counter() - start

    def _commit(self, manifest: Manifest, times: SyncTimes, must_differ: bool) -> None:
        times.changed_fraction = changed_fraction(self._previous, manifest)
        # In bfloat16 a small learning rate may really leave every weight where it was.
        if must_differ and times.changed_fraction == 0 and self.dtype == torch.float32:
            raise SyncError(
                f"weight version {manifest.version} equals version {self._previous.version} bit for bit, "
                "although the optimizer stepped in between: the weights are stale"
            )
        start = time.perf_counter()
        text = manifest.to_json()
        try:
            seconds = self.fleet.each(lambda engine: engine.commit(self._encoded({"manifest": text}), manifest.version))
        finally:
            self.transport.release()
        times.engine_verify_s = max(seconds, default=0.0)
        times.verify_s += time.perf_counter() - start
        self._previous = manifest

    def _encoded(self, value: dict[str, str]) -> list[str]:
        return [encode(value)] * self._workers  # no tensors inside, so one encoding serves all workers

    def _metrics(self, times: SyncTimes, seconds: float) -> Sums:
        if not self.is_sender:
            return {}
        return {
            "sync/bytes": (times.bytes, 1),
            "sync/gb_per_s": (times.bytes / seconds / 1e9, 1),
            "sync/gather_s": (times.gather_s, 1),
            "sync/wait_s": (times.wait_s, 1),
            "sync/changed_tensors_fraction": (times.changed_fraction, 1),
            "sync/verify_s": (times.verify_s, 1),
            "sync/engine_verify_s": (times.engine_verify_s, 1),
            "sync/verify_fraction": (max(times.verify_s, times.engine_verify_s) / seconds, 1),
        }


def changed_fraction(before: Manifest | None, now: Manifest) -> float:
    """Tensors whose bytes differ between two versions; all of them when there is no version before."""
    if before is None:
        return 1.0
    known = set(before.records)
    return sum(record not in known for record in now.records) / len(now.records)
