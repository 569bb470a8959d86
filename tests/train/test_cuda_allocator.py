"""When the allocator is asked; that it does what it is asked needs a GPU."""

import pytest
import torch

from rlhf_mp.phase import Phase
from rlhf_mp.train.cuda_allocator import EmptiedCache, limit_share

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")
STEP = (Phase.rollout, Phase.score, Phase.train, Phase.sync)


@pytest.mark.parametrize(("device", "every", "after_steps"), [(CUDA, 1, [1, 2, 3, 4, 5]), (CUDA, 2, [2, 4]),
                                                              (CUDA, 0, []), (CPU, 1, [])])  # fmt: skip
def test_the_cache_is_emptied_after_every_nth_steps_training(monkeypatch, device, every, after_steps):
    past, emptied = [], []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(past[-1]))
    cache = EmptiedCache(device, every)
    for step in range(1, 6):
        for phase in STEP:
            past.append((step, phase))
            with cache.during(phase):
                assert (step, phase) not in emptied
    assert emptied == [(step, Phase.train) for step in after_steps]


def test_a_share_is_asked_for_on_a_gpu_and_only_if_it_is_set(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *args: asked.append(args))
    for device, fraction in [(CUDA, 0.9), (CUDA, None), (CPU, 0.9)]:
        limit_share(device, fraction)
    assert asked == [(0.9, CUDA)]
