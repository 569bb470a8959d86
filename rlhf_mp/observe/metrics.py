"""The numbers of a step: collected on each rank as (sum, count), added over ranks, divided once.

Names are ``<phase or part>/<what>_<unit>``: ``actor/pg_loss``, ``rollout/reward_mean``, ``sync/bytes``,
``eval/accuracy``, ``time/rollout_s``. Steps are numbered by how many are done: 1 after the first, and a
validation before training belongs to step 0.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

from rlhf_mp.data.types import SampleText, Sums
from rlhf_mp.observe.reduce import added
from rlhf_mp.observe.sinks import Sink
from rlhf_mp.phase import Phase

RATES = {
    "throughput/tokens_per_s": ("rollout/response_tokens", "time/step_s"),
    "throughput/rollout_tokens_per_s": ("rollout/response_tokens", "time/rollout_s"),
    "throughput/score_tokens_per_s": ("score/tokens", "time/score_s"),
    "throughput/train_tokens_per_s": ("train/tokens", "time/train_s"),
}
"""Derived: the numerator's sum over all ranks, by the mean seconds of a rank. Only where a step has both."""


class MetricLog:
    """Every rank has one; only rank 0's has sinks.

    Args:
        reduce: adds the sums of all ranks (collective), e.g. ``reduce_over_ranks``.
    """

    def __init__(self, sinks: Sequence[Sink], reduce: Callable[[Sums], Sums]):
        self.sinks, self.reduce = sinks, reduce
        self.start()

    def start(self) -> None:
        """Begin the next step with nothing. ``finish`` does so too: call this after anything that is not a step."""
        self._sums: Sums = {}
        self._seconds: dict[str, float] = {}
        self._started = perf_counter()

    def add(self, sums: Sums, prefix: str = "") -> None:
        self._sums = added([self._sums, {prefix + name: pair for name, pair in sums.items()}])

    @contextmanager
    def time(self, phase: Phase) -> Iterator[None]:
        """Add to ``time/<phase>_s``. Several times in a step add up; ranks are averaged."""
        began = perf_counter()
        yield
        name = f"time/{phase.value}_s"
        self._seconds[name] = self._seconds.get(name, 0.0) + perf_counter() - began

    def finish(self, step: int, part: str = "step") -> dict[str, float]:
        """Reduce over ranks (collective), divide, write to all sinks, start afresh.

        Args:
            part: what ends here. Its wall time since the last ``finish`` or ``start`` becomes ``time/<part>_s``:
                "step", or "eval" for a validation that is written apart from a step.

        Returns:
            The same on every rank, sorted by name. A metric with count 0 is left out.
        """
        self._seconds[f"time/{part}_s"] = perf_counter() - self._started
        sums = self.reduce(added([self._sums, {name: (seconds, 1.0) for name, seconds in self._seconds.items()}]))
        metrics = {name: total / count for name, (total, count) in sums.items() if count}
        for rate, (tokens, seconds) in RATES.items():
            if tokens in sums and seconds in metrics:
                metrics[rate] = sums[tokens][0] / metrics[seconds]
        metrics = dict(sorted(metrics.items()))
        for sink in self.sinks:
            sink.write(step, metrics)
        self.start()
        return metrics

    def samples(self, step: int, texts: Sequence[SampleText]) -> None:
        """Show some responses. Not collective."""
        for sink in self.sinks:
            sink.samples(step, texts)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()
