"""Utilization by phase, from whatever answers; on a CPU nobody does."""

import time
from itertools import chain, repeat

import pytest
import torch

from rlhf_mp.observe.gpu_utilization import GpuUtilization, nvml_reader
from rlhf_mp.phase import Phase


def test_a_phase_has_the_mean_of_what_was_read_in_it():
    answers = chain([20.0, 40.0], repeat(30.0))
    utilization = GpuUtilization(lambda: next(answers), interval_s=0.001)
    with utilization.during(Phase.train):
        time.sleep(0.5)
    assert utilization.metrics() == {"gpu/train_utilization": pytest.approx(0.3)}


def test_a_phase_shorter_than_the_interval_tells_nothing():
    utilization = GpuUtilization(lambda: 100.0, interval_s=60)
    with utilization.during(Phase.sync):
        pass
    assert utilization.metrics() == {}


def test_nobody_is_asked_on_a_cpu():
    assert nvml_reader(torch.device("cpu")) is None
    with GpuUtilization(None).during(Phase.train):
        pass
