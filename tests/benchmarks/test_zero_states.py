"""The plan of model states against real DeepSpeed engines on two CPU ranks."""

import json
from pathlib import Path

import pytest

from benchmarks.states import compare

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "zero_states.json"


def misses(cells, tolerance=0.05):
    return [
        (cell["num_ranks"], cell["dtype"], cell["stage"], part, difference)
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


def test_the_published_measurements_hold():
    cells = json.loads(RESULTS.read_text())["cells"]
    assert {cell["num_ranks"] for cell in cells} == {1, 2}
    assert misses(cells) == []
