"""Megatron computes what one plain process computes, however model and data are spread over ranks."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from oracle import make_critic_checkpoint
from torchrun import on_ranks
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(find_spec("mbridge") is None, reason="Megatron is not installed"),
]
WORKER = Path(__file__).with_name("megatron_worker.py")
TOLERANCE = 1e-5  # largest difference after ten steps in float32; of the gradient's norm, relative
ROLES = ("actor", "critic")
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
MODELS = {
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 32}),
    "llama": (LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
}
LAUNCHES = [
    (1, "qwen2", False),
    pytest.param((1, "qwen3", True), marks=pytest.mark.long),
    (2, "qwen3", True),
    (2, "llama", False),
    (4, "llama", True),
]


def make_model(kind: str, tied: bool, path: Path) -> None:
    """A vocabulary that must be padded, a padding token that occurs in texts, grouped key-value heads, biases not 0."""
    config_class, own = MODELS[kind]
    config = config_class(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=131,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        **own,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(3)
    model.save_pretrained(path)


@pytest.fixture(scope="module", params=LAUNCHES, ids=lambda p: f"{p[0]} ranks, {p[1]}{', tied' if p[2] else ''}")
def launched(request, tmp_path_factory) -> dict:
    """What the worker found, see megatron_worker.py: largest differences per role and layout."""
    num_ranks, kind, tied = request.param
    folder = tmp_path_factory.mktemp(f"{kind}_{num_ranks}")
    make_model(kind, tied, folder / "actor")
    make_critic_checkpoint(folder / "actor", folder / "critic")
    on_ranks(WORKER, num_ranks, folder, str(folder), *ROLES, timeout_s=840)
    return json.loads((folder / "report.json").read_text())


@pytest.fixture(params=ROLES)
def report(request, launched) -> dict:
    return launched[request.param]


def test_every_layout_trains_like_one_process(report):
    assert report["first_loss"] != 0
    assert report["smallest_move"] > 2e-5  # every weight has been trained, by more than it may differ
    for name, case in report["layouts"].items():
        for what in ("loss", "grad_norm", "weights", "score", "frozen"):
            assert case[what] <= TOLERANCE, (name, what, case)


def test_what_was_read_is_written_back_bit_for_bit(report):
    assert {name: case["export"] for name, case in report["layouts"].items()} == dict.fromkeys(report["layouts"], 0.0)


def test_nothing_is_freed_while_it_is_sent_to_another_stage(report):
    assert {name: case["freed_in_flight"] for name, case in report["layouts"].items()} == dict.fromkeys(
        report["layouts"], 0
    )


def test_a_run_goes_on_in_another_layout_as_if_it_had_never_stopped(report):
    for name, case in report["resumed"].items():
        for what in ("loss", "grad_norm", "weights"):
            assert case[what] <= TOLERANCE, (name, what, case)
