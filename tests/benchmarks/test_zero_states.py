"""The plan of model states against real DeepSpeed and Megatron engines on two CPU ranks."""

import json
from pathlib import Path

import pytest

from benchmarks.states import compare, layout_name

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def misses(cells, tolerance=0.05):
    return [
        (cell["num_ranks"], cell["dtype"], layout_name(cell), part, difference)
        for cell in cells
        for part, difference in cell["difference"].items()
        if difference is not None and abs(difference) > tolerance
    ]


@pytest.mark.engine
def test_every_component_is_planned_within_5_percent(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cells = compare(tiny_checkpoint, 2, tmp_path / "log")
    assert len(cells) == 15  # stage 0 in float32, stages 1 to 3 in both types, with and without offload
    assert misses(cells) == []
    for cell in cells:  # nothing is planned that is not there, and nothing is there that is not planned
        assert {k for k, v in cell["planned_bytes"].items() if v} == {k for k, v in cell["measured_bytes"].items() if v}


@pytest.mark.engine
def test_megatron_keeps_what_is_planned_within_5_percent(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cells = compare(tiny_checkpoint, 2, tmp_path / "log", "megatron")
    assert len(cells) == 14  # TP2, PP2, DP2, with plain optimizers and on the host, in both types
    assert misses(cells) == []
    for cell in cells:
        assert {k for k, v in cell["planned_bytes"].items() if v} == {k for k, v in cell["measured_bytes"].items() if v}


@pytest.mark.parametrize("name", ["zero_states", "megatron_states"])
def test_the_published_measurements_hold(name):
    cells = json.loads((RESULTS / f"{name}.json").read_text())["cells"]
    assert {cell["num_ranks"] for cell in cells} == {1, 2}
    assert misses(cells) == []
