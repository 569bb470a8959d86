"""Whose turn it is to have the memory that trainer and engines share: who gives it back, when, and who waits for it."""

import pytest
from swap_parts import Actor, dies_in, pooled, sync, verified, weights

from rlhf_mp.errors import SyncError


def test_engines_that_sleep_have_memory_for_weights_first_and_for_the_cache_after_the_proof():
    events = []
    made, pool = pooled(events)
    made.sleep()
    assert pool.settled == ["nothing"]  # before any of them is paused, nobody samples any more
    own = [event[1:] for event in events if event[0] == "engine 0"]
    assert own == [("pause",), ("sleep",)]
    for version in (3, 4):  # the second time they are awake
        made.push(weights(version), version, must_differ=False)
    own = [event[1] if event[1] != "wake" else event[1:] for event in events if event[0] == "engine 0"][2:]
    assert own == [
        "pause", ("wake", "weights"), "begin", "commit", ("wake", "kv_cache", "cuda_graph"), "resume",
        "pause", "begin", "commit", "resume",
    ]  # fmt: skip


def test_engines_whose_base_stays_give_back_what_is_beside_it():
    events = []
    made = sync(events, base_stays=True)
    made.sleep()
    made.push(weights(3), 3, must_differ=False)
    assert [event[1:] for event in events if event[1:2] == ("wake",)] == [("wake", "kv_cache", "cuda_graph")]


def test_a_trainer_whose_engines_do_not_sleep_asks_nobody():
    events = []
    made = verified(events)
    assert made.sleep() == {} and events == []
    made.sleeps = True
    assert made.sleep()["sleep/freed_bytes"] == (0, 1)  # of a CPU
    assert [event[1] for event in events] == ["pause", "sleep"]


class Parked:
    """What a rank does not need while engines sample; and its weights, as a swap asks for them."""

    def __init__(self, events: list):
        self.events, self.is_out = events, False

    def out(self):
        self.events.append(("rank", "out"))
        self.is_out = True
        return {"park/out_s": (0.1, 1)}

    def back(self):
        self.events.append(("rank", "back"))
        self.is_out = False
        return {"park/back_s": (0.1, 1)}


def test_ranks_make_room_before_the_engines_fill_it_and_come_back_after_they_have_left():
    events = []
    made = verified(events)
    made.sleeps, made.parking = True, Parked(events)
    assert "park/out_s" in made.push(Actor([-1.0, -2.0]), 3, must_differ=False)
    assert events.index(("rank", "out")) < events.index(("engine 0", "begin", 2))
    events.clear()
    assert made.sleep().keys() >= {"sleep/s", "park/back_s"}
    assert [event[1] for event in events] == ["pause", "sleep", "back"]
    events.clear()
    made.reclaim()
    assert events == []  # it is the trainer's turn already
    made.push(Actor([-1.0, -2.0]), 4, must_differ=False)
    events.clear()
    made.reclaim()
    assert [event[1] for event in events] == ["pause", "sleep", "back"]


def test_memory_that_sleeping_engines_give_back_is_waited_for(monkeypatch):
    made = verified([])
    made.sleeps, free = True, iter([100, 100, 350, 350])  # before, not yet, then
    made.free_bytes = lambda: next(free)
    assert made.sleep()["sleep/freed_bytes"] == (250, 1)
    monkeypatch.setattr("rlhf_mp.weights.swap.RELEASE_S", 0.1)
    made.free_bytes = lambda: 100
    with pytest.raises(SyncError, match=r"no more free memory.*free_cache_engine=false"):
        made.sleep()


def test_an_engine_that_is_lost_while_it_should_fall_asleep_is_left_out():
    made, pool = pooled([])
    dies_in(pool.engines[1], "sleep")
    made.sleep()
    made.push(weights(3), 3, must_differ=False)
    assert pool.reasons == {"engine 1": "sleep failed: ConnectionError"}
    assert [engine.name for engine in made.fleet.live] == ["engine 0", "engine 2"]
