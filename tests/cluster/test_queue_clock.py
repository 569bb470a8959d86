"""Who waits for whom, by hand."""

from contextlib import ExitStack

from rlhf_mp.cluster.queue_clock import QueueClock


def test_waits_of_both_sides_by_hand():
    now = [0.0]
    clock = QueueClock(lambda: now[0])

    def at(time: float) -> None:
        now[0] = time

    with ExitStack() as first, ExitStack() as second:
        at(10)  # what was before the first sample is nobody's wait
        first.enter_context(clock.sampling())
        clock.asked(0)
        at(12)
        second.enter_context(clock.sampling())  # overlaps: busy is counted once
        at(15)
        first.close()
        assert clock.served(0, ready=0) == {
            "queue/ranks_waited_s": (5.0, 1),
            "queue/engines_idle_s": (0.0, 1),
            "queue/sampling_s": (5.0, 1),
            "queue/steps_ready": (0, 1),
        }
        at(18)
    at(30)
    clock.asked(1)
    told = clock.served(1, ready=2)
    assert told == {
        "queue/ranks_waited_s": (0.0, 1),
        "queue/engines_idle_s": (12.0, 1),  # from 18 to 30
        "queue/sampling_s": (3.0, 1),  # from 15 to 18
        "queue/steps_ready": (2, 1),
    }
    at(99)
    assert clock.served(1, ready=0) == told  # another rank of the same share asks
