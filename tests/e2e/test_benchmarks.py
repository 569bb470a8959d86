"""Benchmarks at their smallest, as a user starts them: they keep running while what they measure changes."""

import json
import subprocess
import sys

import pytest
from job import ROOT, environment

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]


def as_a_user() -> dict[str, str]:
    """Without what lets a test import the project from anywhere."""
    return {name: value for name, value in environment().items() if name != "PYTHONPATH"}


def ended(*words: object) -> str:
    """What a benchmark prints. It must end well."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, words)], env=as_a_user(), cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("config", ["quickstart", "quickstart_megatron"])
def test_a_step_is_compared_with_bare_loops(config, inputs, tmp_path):
    out = tmp_path / "step.json"
    words = ["--config", ROOT / f"configs/{config}.yaml", "--steps", 2, "--rounds", 2, "--json", out]
    printed = ended("benchmarks.step", *words, *inputs)
    found = json.loads(out.read_text())
    assert {"rollout", "train"} == found["ratios"].keys()
    assert all(ratio["ratio"] > 0 for ratio in found["ratios"].values()), found["ratios"]
    assert found["provenance"]["git_commit"] and "train" in printed


@pytest.mark.long
def test_memory_levers_end_with_equal_losses(tmp_path):
    out = tmp_path / "levers.json"
    printed = ended("benchmarks.memory_levers", "--hidden", 64, "--layers", 2, "--steps", 1, "--json", out)
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) > 8 and all(row["peak_bytes"] > 0 for row in rows) and "logits in chunks" in printed


@pytest.mark.long
def test_swaps_and_rollouts_are_measured(tmp_path):
    small = ["--mb", 5, "--ranks", 1, "--tensor-parallel", 1, "--engines", 1, "--rounds", 1, "--per-parameter-mb", 5]
    ended("benchmarks.weight_sync", *small, "--json", tmp_path / "sync.json")
    assert json.loads((tmp_path / "sync.json").read_text())
    ended("benchmarks.rollout", "--at-once", 1, 4, "--tokens", 8, "--rounds", 1, "--json", tmp_path / "rollout.json")
    assert json.loads((tmp_path / "rollout.json").read_text())


@pytest.mark.long
def test_a_short_soak_loses_no_prompt(inputs, tmp_path):
    config = ROOT / "configs/quickstart_async.yaml"
    often = ["--every", 5, "--seed", 1]  # first fault 0.7 s after a step; the default: 9.3 s, all may be over
    words = ["--config", config, "--staleness", 1, "--steps", 8, *often, "--json", tmp_path / "soak.json"]
    ended("benchmarks.soak", *words, *inputs)
    _, disturbed = json.loads((tmp_path / "soak.json").read_text())["runs"]
    assert disturbed["lost"] == disturbed["twice"] == disturbed["too_old"] == 0
    assert sum(disturbed["faults"].values()) > 0
