"""A run that is resumed with another number of ranks goes on as the straight one would have."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_megatron import make_model
from torchrun import on_ranks

pytestmark = pytest.mark.engine
WORKER = Path(__file__).with_name("reshape_worker.py")
TOLERANCE = 1e-5  # largest difference to the run that never stopped; of the gradient's norm, relative
NUM_CASES = {("deepspeed", 2, 1): 5, ("deepspeed", 1, 2): 5, ("deepspeed", 4, 2): 5}
NUM_CASES |= {("lora", 2, 1): 2, ("lora", 1, 2): 2}  # under DeepSpeed
NUM_CASES |= {("megatron", 2, 1): 2, ("megatron", 2, 2): 2, ("megatron", 4, 2): 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Four layers and two heads for keys: enough for every layout."""
    path = tmp_path_factory.mktemp("model")
    make_model("qwen3", True, path)
    return path


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    """``saved(backend, num_ranks)``: where so many ranks saved their run half-way."""
    folders = {}

    def folder_of(backend: str, num_ranks: int) -> Path:
        if (backend, num_ranks) not in folders:
            folder = tmp_path_factory.mktemp(f"{backend}_{num_ranks}")
            launch(backend, "save", model, folder, num_ranks)
            folders[backend, num_ranks] = folder
        return folders[backend, num_ranks]

    return folder_of


def launch(backend: str, task: str, model: Path, folder: Path, num_ranks: int) -> None:
    on_ranks(WORKER, num_ranks, folder, backend, task, str(model), str(folder))


SHORT = {("deepspeed", 2, 1)}
CASES = [
    pytest.param(case, id=f"{case[0]}, {case[1]} to {case[2]} ranks", marks=[] if case in SHORT else pytest.mark.long)
    for case in NUM_CASES
]


@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_with_another_number_of_ranks(case, saved, model):
    backend, before, now = case
    if backend == "megatron" and find_spec("mbridge") is None:
        pytest.skip("Megatron is not installed")
    folder = saved(backend, before)
    launch(backend, "load", model, folder, now)
    found = json.loads((folder / f"found_{now}.json").read_text())
    assert found["smallest_move"] > 2e-5  # every weight has been trained, by more than it may differ
    assert len(found["cases"]) == NUM_CASES[case]
    for name, differences in found["cases"].items():
        assert max(differences.values()) <= TOLERANCE, (name, differences)
