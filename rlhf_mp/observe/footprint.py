"""What a rank's memory really held, by model and component, and the peak of each phase: beside what was planned.

On a GPU the allocator tells the peaks of every step. On a CPU nothing does: there the tensors of the first two runs of
a phase are counted, as it is slow to do; before the second one the optimizer has made its moments. Engines are other
processes and not in these numbers.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from rlhf_mp.data.types import TokenBatch
from rlhf_mp.observe.live_bytes import LiveBytes
from rlhf_mp.observe.memory import GIB, peak_memory
from rlhf_mp.observe.plan_check import EXPECTED, MEASURED, PLANNED
from rlhf_mp.phase import Phase
from rlhf_mp.planner.job import MegatronLayout
from rlhf_mp.planner.plan import RANK_PROCESS, Plan, make_plan
from rlhf_mp.planner.term import COPIES, Component, Role, Term
from rlhf_mp.train.base import Scorer, TrainEngine

Held = dict[tuple[Role, Component, bool], int]
"""Bytes by model, component and whether they are in host memory."""
COUNTED_RUNS = 2
STATES = (Component.weights, Component.gradients, Component.master, Component.optimizer)


def held_bytes(models: Mapping[Role, Scorer]) -> Held:
    """Every storage once, under the first name that it comes by."""
    seen: set[int] = set()
    held: Held = {}
    for role, model in models.items():
        for component, tensor in model.tensors():
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                key = role, component, tensor.device.type == "cpu"
                held[key] = held.get(key, 0) + storage.nbytes()
    return held


class Footprint:
    """Of one rank."""

    def __init__(
        self, models: Mapping[Role, TrainEngine | Scorer], plan: Plan, device: torch.device, *, packed: bool = False
    ):
        """
        Args:
            models: those that are trained are watched at every optimizer step of their first updates.
            packed: padding does not go through the models.
        """
        self.plan, self.device, self.packed = plan, device, packed
        self._states: Held = {}  # the most of each that was ever there
        self._runs: Counter[Phase] = Counter()
        self._peaks: dict[Phase, float] = {}
        self._reserved: dict[Phase, float] = {}
        self._largest: TokenBatch | None = None
        self.models = dict(models)
        for model in self.models.values():
            if hasattr(model, "before_step"):  # a frozen one takes no steps
                model.before_step = self._at_step

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Measure one run of a phase; only the first two on a CPU."""
        self._runs[phase] += 1
        counted = self._runs[phase] <= COUNTED_RUNS
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            yield
            self._peaks[phase] = torch.cuda.max_memory_allocated(self.device)
            self._reserved[phase] = torch.cuda.max_memory_reserved(self.device)
        elif counted:
            before = sum(held_bytes(self.models).values())
            with LiveBytes(self._tensors()) as live:
                yield
            self._peaks[phase] = before + live.peak
        else:
            yield
        if counted:
            self._look()

    def _tensors(self) -> Iterator[Tensor]:
        return (tensor for model in self.models.values() for _, tensor in model.tensors())

    def _at_step(self, micro_batches: Sequence[TokenBatch]) -> None:
        known = [self._largest] if self._largest is not None else []
        self._largest = max([*micro_batches, *known], key=self._positions)
        if self._runs[Phase.train] <= COUNTED_RUNS:
            self._look()

    def _positions(self, batch: TokenBatch) -> int:
        """Tokens that go through a model."""
        return int(batch.lengths.sum()) if self.packed else batch.tokens.numel()

    def _look(self) -> None:
        for key, size in held_bytes(self.models).items():
            self._states[key] = max(size, self._states.get(key, 0))

    def metrics(self) -> dict[str, float]:
        """GiB so far: measured, planned, and planned for the largest micro-batch that came."""
        rows = peak_memory()
        rows |= _named(MEASURED, {state_name(*key): size for key, size in self._states.items()})
        rows |= _named(MEASURED, {f"{phase.value}_peak": size for phase, size in self._peaks.items()})
        rows |= _named(MEASURED, {f"{phase.value}_reserved": size for phase, size in self._reserved.items()})
        rows |= _named(PLANNED, planned_bytes(self.plan))
        if self._largest is not None:
            rows |= _named(EXPECTED, planned_bytes(self._plan_of_largest(self._largest)))
        return rows

    def _plan_of_largest(self, batch: TokenBatch) -> Plan:
        job, width = self.plan.job, batch.tokens.shape[1]
        score_tokens = job.batch.score_tokens
        if score_tokens is not None and job.workload is not None:  # no mini-batch cuts a forward-only pass
            copies = job.layout.dp if isinstance(job.layout, MegatronLayout) else job.layout.num_ranks
            score_tokens = min(score_tokens, job.workload.num_sequences // copies * width)
        shape = replace(job.batch, tokens=self._positions(batch), score_tokens=score_tokens, sequence=width)
        return make_plan(replace(job, batch=shape))


def _named(prefix: str, sizes: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}{name}_gib": size / GIB for name, size in sizes.items()}


def state_name(role: Role, component: Component, on_host: bool) -> str:
    return f"{role.value}_{component.value}{'_on_host' if on_host else ''}".replace(" ", "_")


def planned_bytes(plan: Plan) -> dict[str, float]:
    """What the plan says of a rank's own process, under the names of what is measured."""
    on_host = plan.job.gpu is None
    found: dict[str, float] = {}
    moments = [(moment.phase, [t for t in moment.terms if is_of_rank(t)]) for moment in plan.moments]
    for _, terms in moments:
        for key in dict.fromkeys((t.role, t.component, t.on_host) for t in terms if t.component in STATES):
            size = sum(t.bytes for t in terms if (t.role, t.component, t.on_host) == key)
            found[state_name(*key)] = max(size, found.get(state_name(*key), 0.0))
    turns = {Phase.rollout, Phase.sync} if plan.job.parks else set()  # they begin or end with everything still there
    for phase, terms in moments:
        if phase in turns:
            continue
        size = sum(t.bytes for t in terms if t.on_host == on_host and t.component not in COPIES)
        found[f"{phase.value}_peak"] = max(size, found.get(f"{phase.value}_peak", 0.0))
    found["rss_peak"] = RANK_PROCESS + max(sum(t.bytes for t in terms if t.on_host) for _, terms in moments)
    return found


def is_of_rank(term: Term) -> bool:
    """No server's, and nothing that no allocator of tensors sees."""
    return term.role not in (Role.engine, Role.reward_server, Role.process)
