"""The schema keeps its promises: help for every knob, sound defaults, names that exist, an up-to-date reference."""

from pathlib import Path
from typing import get_args

import pytest

from rlhf_mp.algorithms.aggregate import loss_aggregations
from rlhf_mp.algorithms.kl import kl_estimators
from rlhf_mp.algorithms.registered import advantage_estimators, policy_losses
from rlhf_mp.config.docs import render
from rlhf_mp.config.keys import ABSENT, ALIASES, FAMILIAR, KNOBS, SECTIONS, choices, nearest
from rlhf_mp.config.knob import default_of
from rlhf_mp.config.load import load_config, range_problems
from rlhf_mp.rewards.registered import rewards

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("key", KNOBS)
def test_a_knob_has_help_and_a_default_within_its_own_range(key):
    field = KNOBS[key]
    assert field.metadata["help"].strip()
    assert not list(range_problems(field, key, default_of(field)))
    if choices(field.type) and default_of(field) is not None:
        default = default_of(field)
        assert set(default if isinstance(default, list) else [default]) <= set(choices(field.type))


@pytest.mark.parametrize(
    ("key", "registry"),
    [
        ("algorithm.adv_estimator", advantage_estimators),
        ("actor_rollout_ref.actor.policy_loss", policy_losses),
        ("actor_rollout_ref.actor.kl_loss_type", kl_estimators),
        ("actor_rollout_ref.actor.loss_agg_mode", loss_aggregations),
        ("reward.name", rewards),
    ],
)
def test_the_choices_are_the_registered_names(key, registry):
    assert sorted(KNOBS[key].metadata["names"] or get_args(KNOBS[key].type)) == list(registry)


def test_names_from_elsewhere_lead_to_real_keys_and_real_keys_are_never_called_absent():
    real = {*KNOBS, *SECTIONS}
    assert {*FAMILIAR.values(), *ALIASES.values()} <= real
    assert not real & {*ABSENT, *ALIASES}


@pytest.mark.parametrize("key", KNOBS)
def test_a_key_typed_without_its_first_section_is_found(key):
    rest = key.partition(".")[2]
    if "." in rest:
        assert nearest(rest).endswith(rest)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_config_loads_and_is_short(path):
    load_config(path)
    assert len(path.read_text().splitlines()) < 40


def test_the_reference_page_is_up_to_date():
    assert (ROOT / "docs" / "config.md").read_text() == render()
