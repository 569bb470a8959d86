"""What is counted of real engines, against the plan and against sizes worked out by hand."""

import json
from dataclasses import replace

import pytest
import torch

from rlhf_mp.config.load import config_from_dict, config_to_dict
from rlhf_mp.data.collate import collate
from rlhf_mp.data.types import Totals, Trajectory
from rlhf_mp.observe.footprint import Footprint, held_bytes, planned_bytes
from rlhf_mp.observe.live_bytes import LiveBytes
from rlhf_mp.observe.plan_check import compare, table
from rlhf_mp.phase import Phase
from rlhf_mp.planner.job import Precision
from rlhf_mp.planner.plan import make_plan
from rlhf_mp.planner.preflight import Machine, plan_of
from rlhf_mp.planner.term import Component, Role
from rlhf_mp.train.build import make_actor, make_reference

CPU = torch.device("cpu")
BYTE_MOMENTS = Precision("wrong", 4, 4, 0, 1, 4)
STATES = ("weights", "gradients", "optimizer_moments")


@pytest.fixture(scope="module")
def config(tiny_checkpoint):
    words = {
        "data.train_files": "x.jsonl",
        "data.train_batch_size": 8,
        "data.max_prompt_length": 16,
        "data.max_response_length": 16,
        "actor_rollout_ref.model.path": tiny_checkpoint,
        "actor_rollout_ref.model.dtype": "float32",
        "actor_rollout_ref.model.enable_gradient_checkpointing": "false",
        "actor_rollout_ref.actor.strategy": "torch",
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        "actor_rollout_ref.actor.use_kl_loss": "true",
        "actor_rollout_ref.rollout.n": 2,
        "trainer.n_gpus_per_node": 1,
        "trainer.device": "cpu",
    }
    return config_from_dict({}, [f"{key}={value}" for key, value in words.items()])


def micro_batches(num: int):
    generator = torch.Generator().manual_seed(0)
    made = []
    for length in [12, 31][:num]:
        ids = torch.randint(2, 14, (8, length), generator=generator).tolist()
        own = length - 4  # of the response
        rows = [Trajectory(row[:4], row[4:], [0.0] * own, [True] * own, 0.0, 0, 0, "stop") for row in ids]
        made.append(collate(rows))
    return made


def loss_fn(output, batch, totals):
    loss = -(output.logprobs * batch.mask).sum() / totals.num_tokens
    return loss, {"loss": (loss, torch.ones(()))}


@pytest.fixture(scope="module")
def trained(config):
    """Two steps of a real engine, watched."""
    actor = make_actor(config, CPU, 10)
    reference = make_reference(config, CPU, actor)
    footprint = Footprint({Role.actor: actor, Role.reference: reference}, plan_of(config, Machine(None, 1e12)), CPU)
    for _ in range(2):
        with footprint.during(Phase.score):
            reference.score(micro_batches(2))
        with footprint.during(Phase.train):
            actor.train_step(micro_batches(2), Totals(300, 16), loss_fn)
    return actor, reference, footprint


def test_phases_in_which_the_turn_changes_have_no_planned_peak(config):
    """They begin or end with all that the trainer has."""
    turns = {"trainer.offload_during_rollout": True}
    parked = config_from_dict(config_to_dict(config), [f"{key}={value}" for key, value in turns.items()])
    machine = Machine(None, 1e12)
    peaks = [{name for name in planned_bytes(plan_of(each, machine)) if "_peak" in name} for each in (config, parked)]
    assert peaks[0] - peaks[1] == {"rollout_peak", "sync_peak"}


def test_every_component_is_measured_as_planned_within_5_percent(trained):
    measured = trained[2].metrics()
    for what in (*(f"actor_{name}" for name in STATES), "reference_weights"):
        assert measured[f"memory/{what}_on_host_gib"] == pytest.approx(measured[f"plan/{what}_on_host_gib"], rel=0.05)


def test_sizes_by_hand(trained, tiny_checkpoint):
    actor, reference, _ = trained
    num = sum(p.numel() for p in actor.module.parameters())
    held = held_bytes({Role.actor: actor, Role.reference: reference})
    assert held[Role.actor, Component.weights, True] == held[Role.reference, Component.weights, True] == 4 * num
    assert held[Role.actor, Component.optimizer, True] == 8 * num  # both of Adam's
    assert (Role.actor, Component.gradients, True) not in held  # given back after the step


def test_a_model_that_shares_its_weights_with_another_is_counted_once(trained):
    actor, _, _ = trained
    both = held_bytes({Role.actor: actor, Role.reference: actor})
    assert both == held_bytes({Role.actor: actor})


def test_a_phase_peaks_above_what_is_held_and_the_plan_for_the_same_batch_is_above_that(trained):
    measured = trained[2].metrics()
    states = sum(measured[f"memory/actor_{name}_on_host_gib"] for name in STATES)
    states += measured["memory/reference_weights_on_host_gib"]
    assert states < measured["memory/train_peak_gib"] < measured["plan_seen/train_peak_gib"]
    assert measured["plan_seen/train_peak_gib"] < measured["plan/train_peak_gib"]  # 32 tokens at 8 x 2 sequences


def test_on_a_cpu_only_the_first_two_runs_of_each_phase_are_measured(trained):
    actor, _, footprint = trained
    before = footprint.metrics()
    with footprint.during(Phase.train):
        torch.ones(2**24)
    after = footprint.metrics()
    assert all(before[name] == after[name] for name in before if "rss" not in name)


def test_a_plan_that_is_off_shows(config, trained):
    """A fault: the plan believes that moments take one byte a parameter."""
    plan = plan_of(config, Machine(None, 1e12))
    wrong = Footprint({Role.actor: trained[0]}, make_plan(replace(plan.job, precision=BYTE_MOMENTS)), CPU)
    with wrong.during(Phase.train):
        trained[0].train_step(micro_batches(1), Totals(300, 16), loss_fn)
    rows = {row["what"]: row for row in compare([wrong.metrics()])}
    assert rows["actor optimizer moments on host"]["difference"] == pytest.approx(1 / 8 - 1, rel=1e-3)
    assert abs(rows["actor weights on host"]["difference"]) < 0.05


def test_the_table_is_of_the_last_step_that_has_both():
    early = {"plan/train_peak_gib": 9.0, "memory/train_peak_gib": 9.0}
    late = {"plan/train_peak_gib": 2.0, "plan_seen/train_peak_gib": 1.1, "memory/train_peak_gib": 1.0, "step": 7}
    unmeasured = {"plan/sync_peak_gib": 5.0}
    (row,) = compare([early, late | unmeasured, {"eval/accuracy": 0.5}])
    assert row == {
        "what": "train peak",
        "planned_gib": 2.0,
        "planned_for_largest_batch_gib": 1.1,
        "measured_gib": 1.0,
        "difference": pytest.approx(0.1),
    }
    shown = table([row]).splitlines()[1].split()
    assert shown == ["train", "peak", "2048.00", "1126.40", "1024.00", "+10.0%"]
    assert json.dumps(row)
    assert compare([]) == []


def test_live_bytes_counts_storages_while_they_live():
    known = torch.zeros(1000)
    with LiveBytes([known]) as live:
        a = torch.ones(256)  # 1 KiB
        b = a.view(16, 16)  # no storage of its own
        known.view(10, 100)
        assert (live.now, live.peak) == (1024, 1024)
        c = a + b.flatten()
        del a, b
        assert (live.now, live.peak) == (1024, 2048)
        del c
    assert (live.now, live.peak) == (0, 2048)


@pytest.mark.parametrize(("packed", "tokens"), [(False, 8 * 31), (True, 8 * 12)])
def test_the_largest_micro_batch_is_the_one_with_most_tokens_that_count(config, trained, packed, tokens):
    short, wide = micro_batches(2)
    wide.lengths = torch.ones(8, dtype=torch.long)  # almost nothing but padding
    footprint = Footprint({Role.actor: trained[0]}, plan_of(config, Machine(None, 1e12)), CPU, packed=packed)
    trained[0].before_step([short, wide])
    trained[0].before_step([short])
    assert footprint._positions(footprint._largest) == tokens
