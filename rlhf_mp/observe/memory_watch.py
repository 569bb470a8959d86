"""Memory by phase while a run goes on: peaks, a warning before it is full, and an explanation when it was.

On a GPU the allocator and the driver are asked, on a CPU the operating system.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice

import torch

from rlhf_mp.errors import OutOfMemory
from rlhf_mp.observe.allocation_history import AllocationHistory
from rlhf_mp.observe.live_tensors import live_bytes
from rlhf_mp.observe.memory import GIB, get_memory_usage, peak_memory, reset_peak
from rlhf_mp.phase import Phase
from rlhf_mp.planner.levers import Lever

FULL = 0.9  # of the device: what is used beyond leaves no room for the next longer batch
FRAGMENTED = 0.3  # of what the allocator reserved: then memory runs out although there is some
SPIKE, USUAL_RUNS = 1.5, 5  # a peak so many times the mean of at least so many before
NUM_LEVERS = 2
SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory", "std::bad_alloc")


def ran_out(error: BaseException) -> bool:
    """Is this error the lack of memory, on a GPU or on the host?"""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in SIGNS)


class MemoryWatch:
    """Of one rank."""

    def __init__(
        self,
        device: torch.device,
        rank: int,
        levers: Callable[[Phase], Iterable[Lever]],
        say: Callable[[str], None] = print,
        history: AllocationHistory | None = None,
    ):
        """
        Args:
            levers: what would make a phase need less, the cheapest first.
            history: of the GPU's allocations, written when they end in an error.
        """
        self.history = history
        self.device, self.rank, self.levers, self.say = device, rank, levers, say
        self._peaks: dict[Phase, list[float]] = {}  # GiB allocated at most, of every run
        self._found: dict[str, float] = {}
        self._warned: set[Phase] = set()

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Measure one run of a phase.

        Raises:
            OutOfMemory: the body ran out of memory; with what held it, and the cheapest levers still off.
        """
        reset_peak()
        before = get_memory_usage(self.device)
        try:
            yield
        except BaseException as error:
            if not ran_out(error):
                raise
            raise OutOfMemory(self.explain(phase, error)) from error
        self._note(phase, before, get_memory_usage(self.device))

    def metrics(self) -> dict[str, float]:
        """GiB and shares of 1, of the last run of every phase; host memory of the whole process.

        ``memory/<phase>_transient_gib`` is what the phase took on top of what was there when it began.
        """
        return peak_memory() | self._found

    def explain(self, phase: Phase, error: BaseException) -> str:
        """Who ran out of what, what held it, and what to turn."""
        usage, held = get_memory_usage(self.device), live_bytes(self.device)
        on_gpu, first_line = self.device.type == "cuda", (str(error) or type(error).__name__).splitlines()[0]
        where, tensors = ("GPU", f" ({usage['allocated']:.2f} in tensors)") if on_gpu else ("host", "")
        lines = [
            f"rank {self.rank} ran out of {where} memory in phase {phase.value}: {first_line}",
            f"  in use: {usage['total'] - usage['free']:.2f} of {usage['total']:.2f} GiB, of which this process "
            f"{usage['reserved']:.2f}{tensors}",
            "  held by: " + ", ".join(f"{kind} {size / GIB:.2f} GiB" for kind, size in held.items()),
        ]
        if on_gpu:
            hidden = usage["allocated"] - sum(held.values()) / GIB
            lines[-1] += f", kept for the backward pass {max(0.0, hidden):.2f} GiB"
        if usage["fragmentation"] > FRAGMENTED:
            lines.append(
                f"  {usage['fragmentation']:.0%} of what the allocator holds is unused pieces: "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            )
        if self.history is not None:
            lines.append(f"  {self.history.write()}")
        return "\n".join([*lines, *self._advice(phase)])

    def _advice(self, phase: Phase) -> list[str]:
        levers = [*islice(self.levers(phase), NUM_LEVERS)]
        if not levers:
            return ["  every lever of this config is on: shorter sequences, more GPUs or a smaller model"]
        return ["  cheapest levers still off:", *(f"    {lever}" for lever in levers)]

    def _note(self, phase: Phase, before: dict[str, float], after: dict[str, float]) -> None:
        peak = after["peak_allocated"]
        self._found |= {
            f"memory/{phase.value}_allocated_peak_gib": peak,
            f"memory/{phase.value}_transient_gib": max(0.0, peak - before["allocated"]),
            f"memory/{phase.value}_fragmentation": after["fragmentation"],
            "memory/utilization": after["utilization"],
        }
        self._warn_if_spiking(phase, peak)
        used = after["utilization"] + max(0.0, after["peak_reserved"] - after["reserved"]) / after["total"]
        if used > FULL and phase not in self._warned:
            self._warned.add(phase)
            device = "GPU" if self.device.type == "cuda" else "host"
            warning = (
                f"memory: rank {self.rank} used {used:.0%} of its {device} in phase {phase.value}; "
                "the next longer batch may not fit"
            )
            self.say("\n".join([warning, *self._advice(phase)]))

    def _warn_if_spiking(self, phase: Phase, peak: float) -> None:
        earlier = self._peaks.setdefault(phase, [])
        usual = sum(earlier) / len(earlier) if earlier else 0.0
        if len(earlier) >= USUAL_RUNS and peak > SPIKE * usual:
            self.say(
                f"memory: rank {self.rank} peaked at {peak:.2f} GiB in run {len(earlier) + 1} of phase {phase.value}, "
                f"usually {usual:.2f}"
            )
        earlier.append(peak)
