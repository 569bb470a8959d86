"""SGD steps alike under every backend, and its momentum is in their checkpoints."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from torchrun import on_ranks

pytestmark = pytest.mark.engine
WORKER = Path(__file__).with_name("sgd_worker.py")
TOLERANCE = 1e-5  # largest difference after ten steps in float32; of the gradient's norm, relative
# of all elements, on the rank that keeps most: ZeRO shares moments from stage 1 on, tensor parallelism all but norms
MOMENTS = {
    "deepspeed": {"stage 0": 1, "stage 1": 0.5, "stage 2, offload": 0.5, "stage 3": 0.5, "stage 3, offload": 0.5},
    "megatron": {"TP2": 0.5, "PP2": 0.5, "DP2": 1},
}


@pytest.mark.parametrize("backend", MOMENTS)
def test_ten_steps_resumed_half_way_agree_with_torchs_own(backend, tiny_checkpoint, tmp_path):
    if backend == "megatron" and find_spec("mbridge") is None:
        pytest.skip("Megatron is not installed")
    on_ranks(WORKER, 2, tmp_path, backend, str(tiny_checkpoint), str(tmp_path))
    found = json.loads((tmp_path / f"{backend}.json").read_text())
    assert found.pop("smallest_move") > 10 * TOLERANCE
    cases = {f"momentum 0.9, {name}": share for name, share in MOMENTS[backend].items()}
    cases[f"momentum 0, {next(iter(MOMENTS[backend]))}"] = 0
    assert found.keys() == cases.keys()
    for name, share in cases.items():
        assert max(found[name][what] for what in ("loss", "grad_norm", "weights")) <= TOLERANCE, name
        assert found[name]["moments"] == pytest.approx(share, rel=0.1), name
