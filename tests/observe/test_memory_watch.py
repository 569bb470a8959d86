"""Memory by phase: what is measured, when it warns, and what a run that was out of memory is told."""

import pytest
import torch

from rlhf_mp.errors import OutOfMemory
from rlhf_mp.observe import memory_watch
from rlhf_mp.observe.live_tensors import live_bytes
from rlhf_mp.observe.memory_watch import MemoryWatch, ran_out
from rlhf_mp.phase import Phase
from rlhf_mp.planner.levers import Lever

CPU, MIB = torch.device("cpu"), 2**20
LEVERS = [Lever("a.cheap", True, "costs little", 3 * 2**30), Lever("a.dear", 4, "costs more"), Lever("a.last", 1, "x")]


def watch_of(levers=LEVERS) -> tuple[MemoryWatch, list[str]]:
    said: list[str] = []
    return MemoryWatch(CPU, 3, lambda phase: levers, said.append), said


def test_a_phase_is_measured_apart_from_those_before_it():
    watch, said = watch_of()
    with watch.during(Phase.score):
        torch.ones(128 * MIB // 4)
    with watch.during(Phase.train):
        torch.ones(64 * MIB // 4)
    found = watch.metrics()
    assert found["memory/score_transient_gib"] == pytest.approx(1 / 8, abs=0.03)
    assert found["memory/train_transient_gib"] == pytest.approx(1 / 16, abs=0.03)
    assert found["memory/score_allocated_peak_gib"] > found["memory/train_allocated_peak_gib"] > 0.1
    assert found["memory/rss_peak_gib"] >= found["memory/score_allocated_peak_gib"] - 1e-6
    assert 0 < found["memory/utilization"] < 1 and said == []


def test_running_out_names_the_phase_what_held_the_memory_and_two_levers():
    """A real allocation that no machine has."""
    watch, _ = watch_of()
    model = torch.nn.Linear(512, 1024)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    with pytest.raises(OutOfMemory) as caught, watch.during(Phase.train):
        torch.empty(2**60, dtype=torch.uint8)
    text = str(caught.value)
    assert text.startswith("rank 3 ran out of host memory in phase train: ")
    assert "weights" in text and "optimizer" in text and "gradients" in text
    assert "a.cheap=true (saves about 3.0 GiB by plan; costs little)" in text
    assert "a.dear=4 (costs more)" in text and "a.last" not in text
    assert ran_out(caught.value.__cause__)


def test_with_every_lever_on_it_says_so():
    watch, _ = watch_of([])
    with pytest.raises(OutOfMemory, match="every lever of this config is on"), watch.during(Phase.sync):
        raise MemoryError("no more")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_running_out(error, expected):
    assert ran_out(error) == expected


def test_any_other_error_passes_through():
    watch, _ = watch_of()
    with pytest.raises(KeyError, match="mine"), watch.during(Phase.train):
        raise KeyError("mine")


def usage(**changed) -> dict[str, float]:
    found = {"allocated": 8.0, "reserved": 10.0, "peak_allocated": 9.0, "peak_reserved": 10.0, "free": 20.0}
    return found | {"total": 100.0, "utilization": 0.8, "fragmentation": 0.2, "num_retries": 0.0} | changed


def test_above_90_percent_it_warns_once_a_phase_with_the_lever_to_pull(monkeypatch):
    watch, said = watch_of()
    monkeypatch.setattr(memory_watch, "get_memory_usage", lambda device: usage(utilization=0.89))
    with watch.during(Phase.train):
        pass
    assert said == []
    # 85 % at the end, and 7 GiB more were reserved at the peak
    monkeypatch.setattr(memory_watch, "get_memory_usage", lambda device: usage(utilization=0.85, peak_reserved=17.0))
    for phase in (Phase.train, Phase.train, Phase.score):
        with watch.during(phase):
            pass
    assert len(said) == 2 and "rank 3 used 92% of its host in phase train" in said[0] and "a.cheap=true" in said[0]
    assert "phase score" in said[1]


def test_a_peak_far_above_the_usual_is_reported(monkeypatch):
    watch, said = watch_of()
    for peak in (9.0, 9.5, 9.0, 8.5, 9.0, 9.4, 20.0):
        monkeypatch.setattr(memory_watch, "get_memory_usage", lambda device, peak=peak: usage(peak_allocated=peak))
        with watch.during(Phase.train):
            pass
    assert len(said) == 1 and "peaked at 20.00 GiB in run 7 of phase train, usually 9.07" in said[0]


def test_live_tensors_are_counted_once_by_what_they_are_for():
    before = live_bytes(CPU)
    model = torch.nn.Linear(256, 512, bias=False)  # 0.5 MiB
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()  # two moments of 0.5 MiB, and a step
    other = torch.ones(MIB // 4).view(2, -1)[0]  # a view: its storage counts, once
    grown = {kind: size - before[kind] for kind, size in live_bytes(CPU).items()}
    assert grown["weights"] == grown["gradients"] == MIB // 2
    assert grown["optimizer"] == MIB + 4
    assert grown["other tensors"] >= MIB and other.numel()
