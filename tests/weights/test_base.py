"""One swap on fake engines: what is called in which order, what is refused, what other ranks do."""

import pytest
import torch
from swap_parts import Actor, dies_in, engines_of, pooled, sync, verified, weights

from rlhf_mp.data.types import Trajectory
from rlhf_mp.errors import EngineError, EngineLost, SyncError
from rlhf_mp.weights.canary import Canary
from rlhf_mp.weights.swap import VerifiedSwap


def test_engines_pause_before_the_first_byte_and_resume_after_the_proof():
    events = []
    sync(events).push(weights(3), 3, must_differ=False)
    assert events == [
        ("engine 0", "pause"),
        ("engine 0", "begin", 2),  # once for each worker
        ("start", ["w0", "w1"]),
        ("sent", ["w0", "w1"]),
        ("start", ["w2", "w3"]),
        ("sent", ["w2", "w3"]),
        ("finish",),
        ("engine 0", "commit", 2, 3),
        ("release",),  # only now has each worker said what arrived
        ("engine 0", "resume"),
    ]


def test_every_engine_goes_through_the_same_steps():
    events = []
    made = sync(events, engines=3)
    made.push(weights(3), 3, must_differ=False)
    assert made.transport.connected == ["engine 0", "engine 1", "engine 2"]
    for name in made.transport.connected:
        assert [event[1] for event in events if event[0] == name] == ["pause", "begin", "commit", "resume"]


def test_other_ranks_help_to_gather_and_to_send_and_do_no_more():
    events = []
    made = sync(events, is_sender=False)
    assert made.push(weights(3), 3, must_differ=True) == {}
    both = [["w0", "w1"], ["w2", "w3"]]
    assert events == [(what, names) for names in both for what in ("start", "sent")]
    assert made.transport.connected is None


def test_a_refused_version_leaves_the_engines_paused(monkeypatch):
    """Nothing may be sampled from a half-swapped model."""
    events = []
    made = sync(events)

    def refuse(manifest_payloads, version):
        raise SyncError("engine 0 refused weight version 3")

    monkeypatch.setattr(engines_of(made)[0], "commit", refuse)
    with pytest.raises(SyncError):
        made.push(weights(3), 3, must_differ=False)
    assert ("engine 0", "resume") not in events


def test_an_engine_that_fails_is_an_error_though_others_are_well(monkeypatch):
    made = sync([], engines=2)

    def fail():
        raise EngineLost("engine 1", "/pause_generation failed")

    monkeypatch.setattr(engines_of(made)[1], "pause", fail)
    with pytest.raises(EngineError, match="engine 1"):
        made.push(weights(3), 3, must_differ=False)


def test_weights_that_did_not_move_although_they_had_to_are_stale():
    made = sync([])
    made.push(weights(1), 3, must_differ=True)  # there is nothing to compare with yet
    with pytest.raises(SyncError, match="version 4 equals version 3 bit for bit.*stale"):
        made.push(weights(1), 4, must_differ=True)


def test_equal_weights_are_fine_without_a_step_between_and_in_bfloat16():
    made = sync([])
    for version in (3, 4):
        made.push(weights(1), version, must_differ=False)
    half = sync([], dtype=torch.bfloat16)
    for version in (3, 4):
        half.push(weights(1), version, must_differ=True)


def test_metrics_by_hand():
    made = sync([], engines=2)
    made.push(weights(1), 3, must_differ=False)
    metrics = made.push(weights(2, same=[1]), 4, must_differ=True)
    assert metrics["sync/bytes"] == (80, 1)  # 4 tensors of 5 float32
    assert metrics["sync/changed_tensors_fraction"] == (0.75, 1)
    assert metrics["sync/engine_verify_s"] == (0.25, 1)
    verified_s, share = metrics["sync/verify_s"][0], metrics["sync/verify_fraction"][0]
    assert 0 < verified_s < 0.25 and share > 1  # the engines of this test only say that they took so long


def test_a_swap_is_over_when_every_engines_canary_agrees():
    events = []
    metrics = verified(events, engines=2).push(Actor([-1.0, -2.0]), 5, must_differ=False)
    assert events[-1][1] == "sample" and events.count(("engine 1", "sample")) == 1
    assert metrics["sync/canary_logprob_diff"] == (0.0, 2) and "sync/bytes" in metrics


def test_a_swap_whose_canary_disagrees_is_an_error():
    with pytest.raises(SyncError, match="engine 0 at weight version 5"):
        verified([]).push(Actor([-1.0, -2.5]), 5, must_differ=False)


def test_other_ranks_score_the_sample_of_the_sender():
    """Scoring is collective: a rank that skipped it would hang the others."""
    scored = []

    class Counting(Actor):
        def score(self, micro_batches):
            scored.append(micro_batches[0].tokens.tolist())
            return super().score(micro_batches)

    sample = Trajectory([4], [5, 6], [-9.0, -9.0], [True, True], 0.0, 0, 5, "length")
    swap = VerifiedSwap(sync([], is_sender=False), Canary([4], 2, 1.0, 0.01), broadcast=lambda _: [sample])
    assert swap.push(Counting([-1.0, -2.0]), 5, must_differ=False) == {}
    assert scored == [[[4, 5, 6]]]


@pytest.mark.parametrize("call", ["pause", "begin", "commit", "resume"])
def test_an_engine_that_is_lost_on_the_way_is_left_out_and_the_others_get_the_version(call):
    events = []
    made, pool = pooled(events)
    dies_in(pool.engines[1], call)
    made.push(weights(3), 3, must_differ=False)
    assert pool.reasons == {"engine 1": f"{call} failed: ConnectionError"} and made.whole
    for name in ("engine 0", "engine 2"):
        assert [event[1] for event in events if event[0] == name] == ["pause", "begin", "commit", "resume"]
    assert [event[1] for event in events if event[0] == "engine 1"] == ["pause", "begin", "commit", "resume"][
        : ["pause", "begin", "commit", "resume"].index(call)
    ]


def test_a_swap_that_loses_all_engines_still_gathers_on_every_rank():
    events = []
    made, pool = pooled(events, engines=1)
    dies_in(pool.engines[0], "pause")
    metrics = made.push(weights(3), 3, must_differ=False)
    assert [event[0] for event in events] == ["start", "sent", "start", "sent", "finish", "release"]
    assert metrics["sync/bytes"] == (80, 1)


def test_an_engine_that_refuses_is_an_error_whatever_became_of_the_others(monkeypatch):
    made, pool = pooled([])
    dies_in(pool.engines[0], "commit")

    def refuse(manifest_payloads, version):
        raise SyncError("engine 2 refused weight version 3")

    pool.engines[2].commit = refuse
    with pytest.raises(SyncError, match="engine 2 refused"):
        made.push(weights(3), 3, must_differ=False)


def test_where_one_loss_spoils_the_swap_for_all_it_is_done_again_with_those_that_are_left():
    events = []
    made, pool = pooled(events, all_or_none=True)
    dies_in(pool.engines[1], "begin")
    told = []

    def broadcast(value):
        told.append(value is not None)
        return value

    VerifiedSwap(made, Canary([4], 2, 1.0, tolerance=0.01), broadcast).push(Actor([-1.0, -2.0]), 5, must_differ=False)
    assert told == [False, True]  # every rank hears that it must gather again
    commits = [event[0] for event in events if event[1:2] == ("commit",)]
    assert sorted(commits) == ["engine 0", "engine 2"]
    assert pool.settled == [(5, ["engine 0", "engine 2"])]


def test_an_engine_lost_at_its_canary_serves_nothing():
    made, pool = pooled([])
    dies_in(pool.engines[2], "sample")
    metrics = VerifiedSwap(made, Canary([4], 2, 1.0, tolerance=0.01), broadcast=lambda value: value).push(
        Actor([-1.0, -2.0]), 5, must_differ=False
    )
    assert pool.settled == [(5, ["engine 0", "engine 1"])]
    assert metrics["sync/canary_logprob_diff"] == (0.0, 2)


def test_without_any_engine_left_there_is_no_canary_and_nobody_serves():
    made, pool = pooled([], engines=1)
    dies_in(pool.engines[0], "sample")
    metrics = VerifiedSwap(made, Canary([4], 2, 1.0, tolerance=0.01), broadcast=lambda value: value).push(
        Actor([-1.0, -2.0]), 5, must_differ=False
    )
    assert pool.settled == [(5, [])] and "sync/canary_logprob_diff" not in metrics
