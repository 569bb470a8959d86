import pytest
import torch

from rlhf_mp.observe.memory import peak_memory, reset_peak


def test_host_memory_grows_by_what_is_allocated_and_the_peak_stays():
    before = peak_memory()["memory/rss_gib"]
    block = torch.ones(2**26)  # 0.25 GiB
    during = peak_memory()["memory/rss_gib"]
    assert during - before == pytest.approx(0.25, abs=0.05)
    del block
    assert peak_memory()["memory/rss_peak_gib"] >= during - 0.01


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_peak_of_a_phase_is_its_own():
    block = torch.empty(2**28, device="cuda")  # 1 GiB
    del block
    assert peak_memory()["memory/cuda_peak_gib"] >= 1
    reset_peak()
    assert peak_memory()["memory/cuda_peak_gib"] < 1


def test_without_a_gpu_there_is_no_gpu_metric(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reset_peak()
    assert set(peak_memory()) == {"memory/rss_gib", "memory/rss_peak_gib"}
