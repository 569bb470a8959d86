import threading

import pytest

from rlhf_mp.observe.watchdog import watch
from rlhf_mp.phase import Phase


def stuck_in_a_collective(released):
    assert released.wait(timeout=30)


def test_a_phase_that_hangs_is_named_with_its_rank_and_stacks(capfd):
    released = threading.Event()
    with watch(Phase.rollout, rank=3, timeout_s=0.05, on_timeout=released.set):
        stuck_in_a_collective(released)
    report = capfd.readouterr().err
    assert "rank 3: phase rollout has lasted longer than 0.05 s (trainer.phase_timeout_s)" in report
    assert "in stuck_in_a_collective" in report


def test_a_phase_in_time_is_left_alone(capfd):
    fired = threading.Event()
    with watch(Phase.train, rank=0, timeout_s=1.0, on_timeout=fired.set):
        pass
    assert not fired.wait(timeout=1.2)
    assert capfd.readouterr().err == ""


def test_a_phase_that_fails_is_not_reported_later_and_its_error_passes():
    fired = threading.Event()
    with pytest.raises(ZeroDivisionError), watch(Phase.train, rank=0, timeout_s=1.0, on_timeout=fired.set):
        raise ZeroDivisionError
    assert not fired.wait(timeout=1.2)
