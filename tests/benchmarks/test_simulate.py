"""The activation model against real model code at true width, on tensors without data."""

from dataclasses import replace

import pytest

from benchmarks.simulate import simulate
from rlhf_mp.planner.activations import training_activations
from rlhf_mp.planner.job import EAGER, EAGER_ATTENTION, Batch, TorchLayout
from rlhf_mp.planner.known_models import find_model

TOKENS, LENGTH, LAYERS = 4096, 2048, 4
MODELS = {"llama-3.1-8b": "llama", "qwen2.5-7b": "qwen2", "qwen3-8b": "qwen3", "mistral-7b": "mistral"}


@pytest.mark.parametrize("chunk", [None, 1024])
@pytest.mark.parametrize("recompute", ["none", "elementwise", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_the_planner_agrees_with_real_code_within_5_percent(name, recompute, chunk):
    shape = replace(find_model(name), layers=LAYERS)  # every layer is alike; the width is the model's own
    batch = Batch(TOKENS, LENGTH, logit_tokens=chunk, recompute=recompute)
    planned = training_activations(shape, TorchLayout(), batch, EAGER, 2)
    real = simulate(shape, MODELS[name], sequences=TOKENS // LENGTH, length=LENGTH, recompute=recompute, chunk=chunk)
    assert planned.stored.value == pytest.approx(real.saved, rel=0.05)
    assert planned.peak == pytest.approx(real.backward_peak, rel=0.05)


def test_the_layers_peak_is_the_peak_when_the_vocabulary_is_small():
    for recompute in ("none", "full"):
        shape = replace(find_model("llama-3.1-8b"), layers=LAYERS, vocab=256)
        batch = Batch(TOKENS, LENGTH, recompute=recompute)
        planned = training_activations(shape, TorchLayout(), batch, EAGER, 2)
        real = simulate(shape, "llama", sequences=2, length=LENGTH, recompute=recompute)
        assert planned.working.value > planned.logits.value
        assert planned.peak == pytest.approx(real.backward_peak, rel=0.05)


@pytest.mark.parametrize("recompute", ["none", "elementwise", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_eager_attention_keeps_and_needs_the_matrix_of_scores(name, recompute):
    shape = replace(find_model(name), layers=LAYERS, vocab=256)
    batch = Batch(TOKENS, LENGTH, recompute=recompute)
    planned = training_activations(shape, TorchLayout(), batch, EAGER_ATTENTION, 2)
    real = simulate(shape, MODELS[name], sequences=2, length=LENGTH, recompute=recompute, attention="eager")
    assert planned.stored.value == pytest.approx(real.saved, rel=0.05)
    assert planned.peak == pytest.approx(real.backward_peak, rel=0.05)
