"""The loop, with parts that write down what they are asked: what happens in which order is the whole story."""

from dataclasses import replace

import pytest
import torch
from loop_parts import SHARE, TRAJECTORIES, Scorer, token_times, trainer

from rlhf_mp.data.collate import collate
from rlhf_mp.data.types import MiniBatch, SampleText, TokenTrace, Totals
from rlhf_mp.errors import EngineError
from rlhf_mp.observe.metrics import MetricLog
from rlhf_mp.phase import Phase
from rlhf_mp.trainer.best import Best
from rlhf_mp.trainer.loop import Schedule, padding, scored


def test_two_steps_from_the_first_weights_to_the_last():
    events = []
    trainer(2, events).train()
    assert events == [
        ("push", 0, 0), ("live", 0),
        ("fetch", 0), ("train", 12), ("train", 6), ("push", 1, 2), ("live", 1),
        ("fetch", 1), ("train", 12), ("train", 6), ("push", 2, 4), ("live", 2),
        ("evaluate",), ("save", 2),
    ]  # fmt: skip


def test_evaluation_and_saving_follow_their_own_frequencies_and_the_end():
    events = []
    trainer(7, events, test_freq=3, save_freq=2, val_before_train=True).train()
    told, version = [], 0
    for event in events:
        version = event[1] if event[0] == "live" else version
        if event[0] in ("evaluate", "save"):
            told.append((event[0], version))
    assert told == [
        ("evaluate", 0), ("save", 2), ("evaluate", 3), ("save", 4), ("evaluate", 6), ("save", 6),
        ("evaluate", 7), ("save", 7),
    ]  # fmt: skip


def test_a_resumed_run_repeats_no_step_and_no_first_validation():
    events = []
    made = trainer(4, events, resumed_at=3, val_before_train=True)
    made.resume()
    made.train()
    assert events == [
        ("push", 3, 0), ("live", 3),  # engines were started anew: they get the weights again
        ("fetch", 3), ("train", 12), ("train", 6), ("push", 4, 2), ("live", 4),
        ("evaluate",), ("save", 4),
    ]  # fmt: skip


def test_whatever_needs_the_whole_trainer_makes_it_whole_first(tmp_path):
    events = []
    made = trainer(1, events)
    made.swap.reclaim = lambda: events.append("reclaim")
    made.train()
    made.save_checkpoint(tmp_path / "here")
    made.load_checkpoint(tmp_path / "3")
    assert events == [
        ("push", 0, 0), ("live", 0), ("fetch", 0), "reclaim", ("train", 12), ("train", 6), ("push", 1, 2), ("live", 1),
        ("evaluate",), "reclaim", ("save", 1), "reclaim", ("write", 1, "here"), "reclaim", ("read", "3"),
    ]  # fmt: skip
    made.scored(made.actor, collate(TRAJECTORIES), [[0]])
    assert events[-2] == "reclaim"


def test_checkpoints_at_places_of_ones_own(tmp_path):
    events = []
    made = trainer(4, events)
    made.load_checkpoint(tmp_path / "3")
    made.train()
    made.save_checkpoint(str(tmp_path / "end"))
    assert [event for event in events if event[0] in ("read", "fetch", "write")] == [
        ("read", "3"), ("fetch", 3), ("write", 4, "end"),
    ]  # fmt: skip


def test_a_run_that_is_done_does_nothing_more():
    events = []
    made = trainer(4, events, resumed_at=4)
    made.resume()
    made.train()
    assert events == [("push", 4, 0), ("live", 4)]


def test_a_requested_stop_saves_after_the_step_and_the_resumed_run_takes_it_from_there():
    events, answers = [], iter([False, True])
    made = trainer(4, events, test_freq=2, stop_requested=lambda: next(answers))
    made.train()
    assert (made.step, made.finished) == (2, False)
    assert [event for event in events if event[0] in ("fetch", "save", "evaluate")] == [
        ("fetch", 0), ("fetch", 1), ("save", 2),
    ]  # fmt: skip


def test_a_stop_is_not_asked_for_after_the_last_step():
    trainer(1, [], stop_requested=lambda: pytest.fail("asked")).train()


def test_without_validation_data_nothing_is_evaluated():
    events = []
    trainer(1, events, has_validation=False, test_freq=1, val_before_train=True).train()
    assert ("evaluate",) not in events


def test_a_validation_returns_what_it_found():
    made = trainer(1, [])
    found = made.evaluate()
    assert found["eval/accuracy"] == 0.75 and found["time/eval_s"] > 0
    assert trainer(1, [], has_validation=False).evaluate() == {}


@pytest.mark.parametrize(("old", "reference"), [(False, False), (True, False), (False, True), (True, True)])
def test_only_what_the_algorithm_needs_is_scored_and_before_any_update(old, reference):
    events = []
    made = trainer(1, events, needs_old_logprobs=old, reference=reference)
    made.train()
    names = ["actor"] * old + ["reference"] * reference
    assert events[2 : 3 + len(names)] == [("fetch", 0), *(("score", name) for name in names)]
    (first, loss_fn), (second, _) = made.actor.batches
    assert loss_fn is made.algorithm.policy_loss
    for batch in first + second:
        for field, factor, present in [("old_logprobs", 0.01, old), ("ref_logprobs", 0.02, reference)]:
            if present:
                torch.testing.assert_close(getattr(batch, field), token_times(factor, batch))
            else:
                assert getattr(batch, field) is None


def test_every_micro_batch_has_its_own_rows_advantages_and_rollout_logprobs():
    made = trainer(1, [])
    made.train()
    micro_batches = [batch for batches, _ in made.actor.batches for batch in batches]
    assert [batch.tokens.tolist() for batch in micro_batches] == [
        [[7, 3, 3, 3, 3], [7, 2, 1, 0, 0]], [[8, 8, 4, 1]], [[8, 8, 5]],
    ]  # fmt: skip
    torch.testing.assert_close(micro_batches[0].advantages, torch.tensor([[0.0] * 5, [0.0, 1.0, 1.0, 0.0, 0.0]]))
    torch.testing.assert_close(micro_batches[2].rollout_logprobs, torch.tensor([[0.0, 0.0, -0.5]]))


def test_a_swap_must_bring_other_weights_only_after_an_update_with_a_gradient():
    made = trainer(2, [])
    made.train()
    assert made.swap.must_differ == [False, True, True]
    idle = trainer(2, [])
    idle.actor.grad_norm = 0.0  # every group had equal rewards: nothing to learn
    idle.train()
    assert idle.swap.must_differ == [False, False, False]


def test_every_step_and_every_validation_is_a_record_of_its_own():
    made = trainer(2, [], test_freq=1, val_before_train=True)
    made.train()
    records = made.log.sinks[0].written
    kinds = [(step, "eval" if "time/eval_s" in metrics else "step") for step, metrics in records]
    assert kinds == [(0, "eval"), (1, "step"), (1, "eval"), (2, "step"), (2, "eval")]
    for step, metrics in records:
        if "time/eval_s" in metrics:
            assert {name for name in metrics if not name.startswith("time/")} == {"eval/accuracy"}
            assert metrics["eval/accuracy"] == 0.75
        else:
            assert metrics["rollout/reward_mean"] == 0.5 and metrics["actor/pg_loss"] == 3.0, step
            assert {"time/rollout_s", "time/train_s", "time/sync_s", "memory/rss_gib"} <= metrics.keys()


def test_the_first_step_is_not_charged_for_bringing_the_first_weights():
    recorded = []
    trainer(2, [], log=MetricLog([], lambda sums: recorded.append(dict(sums)) or sums)).train()
    assert [sums["sync/bytes"] for sums in recorded if "sync/bytes" in sums] == [(100.0, 1), (100.0, 1)]


def test_texts_are_shown_with_the_step_they_belong_to():
    made = trainer(2, [], val_before_train=True)
    made.train()
    assert made.log.sinks[0].texts == [(0, ["9"]), (1, ["21"]), (2, ["21"]), (2, ["9"])]


def test_every_phase_is_watched_while_it_lasts():
    made, seen = trainer(1, [], needs_old_logprobs=True, val_before_train=True), {}

    def spy(part, name):
        original = getattr(part, name)

        def spied(*given, **named):
            seen.setdefault(name, set()).add(tuple(made.watched))
            return original(*given, **named)

        setattr(part, name, spied)

    for part, name in [
        (made.rollouts, "fetch"), (made.rollouts, "evaluate"), (made.rollouts, "publish"), (made.swap, "push"),
        (made.actor, "score"), (made.actor, "train_step"), (made.swap, "sleep"),
    ]:  # fmt: skip
        spy(part, name)
    made.train()
    assert seen == {
        "push": {(Phase.sync,)},
        "publish": {(Phase.sync,)},
        "fetch": {(Phase.rollout,)},
        "sleep": {(Phase.rollout,)},
        "evaluate": {(Phase.rollout,)},
        "score": {(Phase.score,)},
        "train_step": {(Phase.train,)},
    }
    assert made.watched == []


def test_an_engines_failure_ends_the_loop_before_anything_is_trained_or_saved():
    events = []
    made = trainer(3, events)

    def fail(step):
        raise EngineError("SGLang engine 0", "was killed by SIGKILL")

    made.rollouts.fetch = fail
    with pytest.raises(EngineError):
        made.train()
    assert events == [("push", 0, 0), ("live", 0)]


def test_engines_that_came_back_without_weights_get_them_and_the_question_is_asked_again():
    events = []
    made = trainer(2, events, val_before_train=True)
    fetch, evaluate = made.rollouts.fetch, made.rollouts.evaluate
    told = {"fetch": [None, None, SHARE, None, SHARE], "evaluate": [None, ({}, []), ({}, [])]}
    made.rollouts.fetch = lambda step: fetch(step) and told["fetch"].pop(0)
    made.rollouts.evaluate = lambda: evaluate() and told["evaluate"].pop(0)
    made.train()
    assert events == [
        ("push", 0, 0), ("live", 0),
        ("evaluate",), ("push", 0, 0), ("live", 0), ("evaluate",),
        ("fetch", 0), ("push", 0, 0), ("live", 0), ("fetch", 0), ("push", 0, 0), ("live", 0), ("fetch", 0),
        ("train", 12), ("train", 6), ("push", 1, 2), ("live", 1),
        ("fetch", 1), ("push", 1, 2), ("live", 1), ("fetch", 1),
        ("train", 12), ("train", 6), ("push", 2, 4), ("live", 2),
        ("evaluate",), ("save", 2),
    ]  # fmt: skip
    assert made.swap.must_differ == [False] * 4 + [True, False, True]  # the same weights again are not stale


def test_a_rank_with_a_part_of_anothers_model_counts_nothing_twice():
    made = trainer(1, [], counts=False)
    made.train()
    ((_, metrics), _) = made.log.sinks[0].written
    assert not {"rollout/reward_mean", "train/tokens", "train/padding_fraction"} & metrics.keys()
    assert "actor/pg_loss" in metrics


def test_scores_come_back_to_the_rows_they_are_of():
    batch = collate(TRAJECTORIES)
    found = scored(Scorer("actor", 0.01, []), batch, [[2], [], [3, 0], [], [1]])
    torch.testing.assert_close(found, token_times(0.01, batch))


def test_padding_by_hand():
    batch = collate(TRAJECTORIES)
    # rows of 3 and 5 tokens: 10 positions, 8 real; a row of 4 alone; an empty micro-batch computes 2 for nothing
    micro_batches = [batch.select(rows) for rows in ([0, 1], [2], [])]
    for packed, wasted in ((False, (4.0, 16)), (True, (2.0, 14))):  # packed, only the empty one is padding
        metrics = padding(micro_batches, packed=packed)
        assert metrics == {"train/tokens": (12.0, 1), "train/padding_fraction": wasted}


@pytest.mark.parametrize(
    ("frequency", "step", "due"), [(-1, 5, False), (-1, 10, True), (5, 5, True), (5, 6, False), (3, 10, True)]
)
def test_something_is_due_every_so_often_and_at_the_end(frequency, step, due):
    assert Schedule(10, -1, -1, False).due(frequency, step) == due


def test_a_share_without_spread_still_takes_its_steps():
    """Ranks take steps together: none may leave one out."""
    equal = [replace(t, reward=1.0) for t in TRAJECTORIES]
    events = []
    made = trainer(1, events)
    made.rollouts.share = replace(SHARE, trajectories=equal)
    made.train()
    assert [event for event in events if event[0] == "train"] == [("train", 12), ("train", 6)]


def test_the_best_validation_is_saved_though_no_checkpoint_is_due():
    events = []
    made = trainer(4, events, test_freq=1, best=Best("eval/accuracy", "max"))
    accuracies = iter([0.5, 0.25, 0.75, 0.75])
    made.rollouts.evaluate = lambda: ({"accuracy": (next(accuracies), 1.0)}, [])
    made.train()
    assert [event for event in events if event[0] == "save"] == [("save", 1), ("save", 3), ("save", 4)]
    assert (made.best.value, made.best.step) == (0.75, 3)


def test_a_run_ends_and_is_saved_with_the_validation_that_is_good_enough():
    events = []
    made = trainer(9, events, test_freq=2, best=Best("eval/accuracy", "max", stop_at=0.7))
    accuracies = iter([0.9, 0.5, 0.75])  # the first one is the untrained model's
    made.rollouts.evaluate = lambda: ({"accuracy": (next(accuracies), 1.0)}, [])
    made.schedule = replace(made.schedule, val_before_train=True)
    made.train()
    assert made.finished and made.step == 4
    assert [event for event in events if event[0] == "save"] == [("save", 2), ("save", 4)]


def test_samples_of_a_step_come_with_their_advantages():
    made, shown = trainer(1, []), []
    trace = TokenTrace([3, 3, 3, 3], [-0.3] * 4, [True] * 4, "length")
    sample = SampleText("7", "9", 0.5, "21", trace=trace, row=1)
    made.rollouts.share = replace(
        SHARE,
        trajectories=[TRAJECTORIES[0], replace(TRAJECTORIES[1], reward=0.5)],
        score_rows=[[0, 1]],
        minibatches=[MiniBatch([[0, 1]], Totals(8, 2))],
        samples=[sample, replace(sample, row=None)],
    )
    made.log.samples = lambda step, texts: shown.extend(texts)
    made.train()
    assert [text.trace.advantages for text in shown[:2]] == [[0.5] * 4, None]
