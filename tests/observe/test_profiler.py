"""The names people know: each measures what it says."""

import logging
import time

import pytest
import torch

from rlhf_mp.observe import profiler
from rlhf_mp.observe.memory import get_memory_usage
from rlhf_mp.observe.profiler import GPUMemoryLogger, PerformanceMonitor, log_gpu_memory_usage, simple_timer

MIB = 2**20


def test_memory_usage_grows_by_what_is_allocated():
    before = get_memory_usage("cpu")
    block = torch.ones(128 * MIB // 4)
    after = get_memory_usage("cpu")
    assert after["allocated"] - before["allocated"] == pytest.approx(1 / 8, abs=0.03)
    assert after["peak_allocated"] >= after["allocated"] - 0.01
    assert 0 < after["free"] < after["total"] and 0 < after["utilization"] < 1
    assert block.numel()


def test_a_line_of_memory_goes_to_the_logger_given(caplog):
    logger = logging.getLogger("mine")
    with caplog.at_level(logging.INFO, "mine"):
        log_gpu_memory_usage("before the forward pass", logger=logger)
    assert "before the forward pass: " in caplog.text and "GiB allocated" in caplog.text


def test_a_decorated_function_is_measured_and_otherwise_the_same(caplog):
    @GPUMemoryLogger(role="actor", logger=logging.getLogger("mine"))
    def update(x: int, *, y: int) -> int:
        """Adds."""
        return x + y

    with caplog.at_level(logging.INFO, "mine"):
        assert update(1, y=2) == 3
    assert update.__doc__ == "Adds."
    assert [record.message.split(":")[0] for record in caplog.records] == ["before actor", "after actor"]


def test_a_timer_adds_up_and_keeps_time_through_an_error():
    timing: dict[str, float] = {}
    started = time.monotonic()
    with simple_timer("part", timing):
        time.sleep(0.02)
    with pytest.raises(ValueError), simple_timer("part", timing):
        time.sleep(0.02)
        raise ValueError
    assert [*timing] == ["part"] and 0.04 <= timing["part"] <= time.monotonic() - started


def test_the_norm_of_gradients_by_hand():
    model = torch.nn.Linear(2, 1)
    assert profiler.monitor_gradients(model) == 0
    model.weight.grad, model.bias.grad = torch.tensor([[3.0, 0.0]]), torch.tensor([4.0])
    assert profiler.monitor_gradients(model) == 5


def test_a_profile_says_what_the_memory_is_for():
    model = torch.nn.Linear(1024, 1024, bias=False)
    found = profiler.profile_memory_usage()
    assert found["weights"] >= model.weight.nbytes / 2**30 and {"gradients", "optimizer", "other_tensors"} <= {*found}


def test_optimizing_turns_on_checkpointing_where_there_is_any():
    class Model(torch.nn.Module):
        settings = None

        def gradient_checkpointing_enable(self, settings):
            self.settings = settings

    model = Model()
    profiler.optimize_memory_usage(model)
    assert model.settings == {"use_reentrant": False}
    profiler.optimize_memory_usage(torch.nn.Linear(1, 1))


def test_a_monitor_sees_what_came_and_went_while_it_ran():
    with PerformanceMonitor(interval_s=0.005) as monitor:
        block = torch.ones(128 * MIB // 4)
        time.sleep(0.1)
        del block
    stats = monitor.get_memory_stats()
    assert stats["num_samples"] >= 5
    assert stats["max_allocated"] - stats["allocated"] == pytest.approx(1 / 8, abs=0.04)


@pytest.mark.parametrize("variable", profiler.LEVEL_VARIABLES)
def test_the_level_comes_from_the_environment(monkeypatch, variable):
    monkeypatch.setattr(profiler, "LOG", logging.getLogger(f"rlhf_mp.{variable}"))
    monkeypatch.setenv(variable, "warning")
    profiler.set_logging_level()
    assert profiler.LOG.level == logging.WARNING


def test_metrics_are_one_line(caplog):
    with caplog.at_level(logging.INFO, "rlhf_mp"):
        profiler.log_performance_metrics({"b": 2.0, "a": 0.5}, logging.getLogger("rlhf_mp"))
    assert caplog.messages == ["a=0.5  b=2"]
