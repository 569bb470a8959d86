"""A loss or gradient that is no finite number on one of two ranks: both skip the step, and nothing of it is left."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from torchrun import on_ranks

pytestmark = pytest.mark.engine
WORKER = Path(__file__).with_name("skip_worker.py")
NUM_CASES = {"deepspeed": 9, "megatron": 6}
FOUND = ("skipped", "unchanged", "goes on as if it had not been", "trained")


@pytest.fixture(scope="module", params=["deepspeed", pytest.param("megatron", marks=pytest.mark.long)])
def launched(request, tiny_checkpoint, tmp_path_factory) -> dict[str, dict[str, bool]]:
    """What the ranks agree on, by case."""
    if request.param == "megatron" and find_spec("mbridge") is None:
        pytest.skip("Megatron is not installed")
    folder = tmp_path_factory.mktemp(request.param)
    on_ranks(WORKER, 2, folder, request.param, str(tiny_checkpoint), str(folder / "out.json"))
    found = json.loads((folder / "out.json").read_text())
    assert len(found) == NUM_CASES[request.param]
    return found


@pytest.mark.parametrize("what", FOUND)
def test_a_step_that_is_no_finite_number_on_one_rank_changes_nothing_on_any(launched, what):
    assert [name for name, case in launched.items() if not case[what]] == []
