import threading
from queue import Empty, Queue

import pytest

from rlhf_mp.observe.watchdog import watch


def test_what_hangs_is_told_with_the_key_of_its_limit_while_it_still_hangs():
    told = Queue()
    with watch("phase rollout", timeout_s=0.05, on_timeout=told.put):
        assert told.get(timeout=30) == "phase rollout lasted longer than 0.05 s (trainer.phase_timeout_s)"


def test_what_ends_in_time_is_left_alone():
    fired = threading.Event()
    with watch("phase train", timeout_s=1.0, on_timeout=lambda reason: fired.set()):
        pass
    assert not fired.wait(timeout=1.2)


def test_what_fails_is_not_told_later_and_its_error_passes():
    told = Queue()
    with pytest.raises(ZeroDivisionError), watch("phase train", timeout_s=1.0, on_timeout=told.put):
        raise ZeroDivisionError
    with pytest.raises(Empty):
        told.get(timeout=1.2)
