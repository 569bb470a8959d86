"""LoRA under DeepSpeed, on one and two real ranks, against the one-process engine with the same adapter."""

import json
from pathlib import Path

import pytest
from oracle import make_critic_checkpoint
from torchrun import on_ranks

pytestmark = pytest.mark.engine
WORKER = Path(__file__).with_name("lora_worker.py")
ROOT = Path(__file__).parents[2]
CASES = {
    "actor": [(0, False, False), (1, False, False), (2, False, True), (3, False, False), (3, True, True)],
    "critic": [(2, False, True), (3, False, False)],
}
TOLERANCE = 1e-5  # largest difference after ten steps in float32; of the gradient's norm, relative


@pytest.fixture(
    scope="module", params=[pytest.param(1, marks=pytest.mark.long, id="1 rank"), pytest.param(2, id="2 ranks")]
)
def launched(request, tiny_checkpoint, tmp_path_factory) -> dict:
    """What the worker measured of both roles, and on how many ranks."""
    folder = tmp_path_factory.mktemp("adapters")
    make_critic_checkpoint(tiny_checkpoint, folder / "critic")
    models = [f"actor={tiny_checkpoint}", f"critic={folder / 'critic'}"]
    on_ranks(WORKER, request.param, folder, str(folder / "out.json"), *models)
    return json.loads((folder / "out.json").read_text()) | {"num_ranks": request.param}


@pytest.fixture(params=["actor", "critic"])
def role(request) -> str:
    return request.param


@pytest.fixture
def actor(launched) -> dict:
    return launched["actor"]


def test_the_oracle_moved_what_has_an_adapter_and_nothing_else(launched, role):
    moves, losses = launched[role]["moves"], launched[role]["loss"]
    adapted = {name: moved for name, moved in moves.items() if "_proj.weight" in name or "score." in name}
    assert min(adapted.values()) > 2 * TOLERANCE and len(adapted) >= 28
    assert {moved for name, moved in moves.items() if name not in adapted} == {0.0}
    assert len(set(losses)) == len(losses) == 10


def test_ten_steps_agree_with_the_one_process_engine(launched, role):
    cases = launched[role]["cases"]
    name = "stage {}, param_offload {}, optimizer_offload {}"
    packed = f"{name.format(3, True, True)}, packed"
    assert [*cases] == [*(name.format(*knobs) for knobs in CASES[role]), packed]
    for measured in cases.values():
        assert measured.keys() == {"loss", "grad_norm", "weights", "score"}
    assert {case: measured for case, measured in cases.items() if max(measured.values()) > TOLERANCE} == {}


def test_merged_weights_compute_what_the_engine_does(launched, role):
    assert launched[role]["merged"] <= TOLERANCE


def test_a_base_in_4_bits_trains_the_same_under_every_stage(actor):
    assert len(actor["quantized"]) == 2
    assert max(difference for measured in actor["quantized"].values() for difference in measured.values()) <= TOLERANCE
    assert abs(actor["quantized_loss"][0] - actor["loss"][0]) > 1e-3  # it is another base


def test_a_base_in_8_bits_trains_the_same_when_shared_and_in_host_memory(actor):
    assert max(actor["8 bits"].values()) <= TOLERANCE
    assert 1e-5 < abs(actor["8-bit loss"][0] - actor["loss"][0]) < abs(actor["quantized_loss"][0] - actor["loss"][0])


def test_the_reference_is_a_separate_base_model_exactly(actor):
    *differences, moved = actor["base"]
    assert differences == [0.0, 0.0, 0.0] and moved > 1e-3


def test_the_optimizer_holds_the_adapter_alone(launched, actor):
    trained = next(iter(actor["resumed"].values()))["adapter"]
    own = -(-trained // launched["num_ranks"])  # and padding to a round size
    assert own <= actor["states"]["master"] <= own + 64
    assert 2 * own <= actor["states"]["optimizer"] <= 2 * own + 128


def test_a_resume_is_bit_identical_and_its_files_hold_the_adapter_alone(actor):
    assert len(actor["resumed"]) == 3
    for measured in actor["resumed"].values():
        assert measured["difference"] == 0.0
        assert measured["bytes"] < 16 * measured["adapter"] + 400_000 < 4 * actor["parameters"]
