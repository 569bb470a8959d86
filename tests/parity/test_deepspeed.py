"""DeepSpeed ZeRO 0-3, with and without offload, on one and two real ranks, against the one-process engine."""

import json
from pathlib import Path

import pytest
from oracle import make_critic_checkpoint
from torchrun import on_ranks

pytestmark = pytest.mark.engine
WORKER = Path(__file__).with_name("zero_worker.py")
ROOT = Path(__file__).parents[2]
STAGES = [
    f"stage {stage}, param_offload {param}, optimizer_offload {optimizer}"
    for stage, param, optimizer in [
        (0, False, False), (1, False, False), (1, False, True), (2, False, False), (2, False, True), (3, False, False),
        (3, False, True), (3, True, True),
    ]
] + [
    f"stage 3, param_offload True, optimizer_offload True, {extra}"
    for extra in ("packed, activations on the host", "selective recomputation")
]  # fmt: skip
TOLERANCE = 1e-5  # largest difference after ten steps in float32; of the gradient's norm, relative


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def launched(request, tiny_checkpoint, tmp_path_factory) -> dict:
    """What the worker measured: all cases of both roles in one launch."""
    folder = tmp_path_factory.mktemp("parity")
    make_critic_checkpoint(tiny_checkpoint, folder / "critic")
    models = [f"actor={tiny_checkpoint}", f"critic={folder / 'critic'}"]
    on_ranks(WORKER, request.param, folder, str(folder / "out.json"), *models)
    return json.loads((folder / "out.json").read_text())


@pytest.fixture(params=["actor", "critic"])
def found(request, launched) -> dict:
    return launched[request.param]


def test_the_reference_engine_really_trained(found):
    """Engines that stand still would agree with each other too."""
    assert found["smallest_move"] > 2e-5  # by more than weights may differ
    assert len(set(found["loss"])) == len(found["loss"]) == 10
    assert all(abs(a - b) > 1e-3 for a, b in zip(found["loss"], found["loss"][1:], strict=False))


def test_every_stage_and_offload_was_tried(found):
    assert [*found["cases"]] == STAGES


@pytest.mark.parametrize("case", STAGES)
@pytest.mark.parametrize("what", ["loss", "grad_norm", "weights", "score"])
def test_ten_steps_agree_with_the_reference_engine(found, case, what):
    assert found["cases"][case][what] <= TOLERANCE


def test_a_frozen_model_scores_like_one_that_is_not_partitioned(found):
    assert found["frozen"] <= TOLERANCE


def test_bfloat16_trains_alongside_float32(found):
    """Three digits: the first loss is close, and every one and every gradient's norm is a number."""
    half = found["bfloat16"]
    assert half["loss"][0] == pytest.approx(found["loss"][0], abs=0.05)
    assert half["loss"] == pytest.approx(found["loss"], abs=0.2)  # nan is not close to anything
    assert all(0 < norm < 100 for norm in half["grad_norm"])
