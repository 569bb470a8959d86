"""What ranks hand over while engines sample comes back bit for bit, whichever backend holds it."""

import json
from pathlib import Path

import pytest
from torchrun import on_ranks

pytestmark = pytest.mark.engine
WORKER = Path(__file__).with_name("parking_worker.py")
CASES = [
    "stage (0, False, False)", "stage (1, False, False)", "stage (2, False, True)", "stage (3, False, False)",
    "stage (3, True, True)", "TP2 SP", "PP2 VPP2", "DP2", "DP2 plain optimizer", "DP2, optimizer on the host",
]  # fmt: skip


@pytest.fixture(scope="module")
def found(tiny_checkpoint, tmp_path_factory) -> dict:
    pytest.importorskip("mbridge")
    folder = tmp_path_factory.mktemp("parking")
    on_ranks(WORKER, 2, folder, str(folder / "out.json"), str(tiny_checkpoint))
    return json.loads((folder / "out.json").read_text())


def test_every_case_was_tried(found):
    assert [*found] == CASES


@pytest.mark.parametrize("case", CASES)
def test_ten_steps_are_bit_for_bit_those_of_a_run_that_keeps_everything(found, case):
    assert found[case]["steps"] and found[case]["weights"]


@pytest.mark.parametrize("case", CASES)
def test_all_but_the_weights_leaves_and_returns(found, case):
    for seen in found[case]["seen"]:
        assert seen["before"]["others"] > 1.4 * seen["before"]["weights"]  # moments at least
        assert seen["during"] == {"weights": seen["before"]["weights"], "others": 0}
        assert seen["after"]["others"] == seen["before"]["others"] == seen["metrics"]["park/freed_bytes"][0]
