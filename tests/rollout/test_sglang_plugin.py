"""The plugin leaves alone what is not ours."""

import sys

import pytest
import torch

from rlhf_mp.rollout import sglang_plugin


@pytest.mark.parametrize("value", [None, "0"])
def test_the_plugin_is_inert_outside_our_servers(monkeypatch, value):
    """Every SGLang on this machine finds it through the entry point."""
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", None)  # importing it would fail
    if value is None:
        monkeypatch.delenv(sglang_plugin.ACTIVE, raising=False)
    else:
        monkeypatch.setenv(sglang_plugin.ACTIVE, value)
    sglang_plugin.install()
    monkeypatch.setenv(sglang_plugin.ACTIVE, "1")
    with pytest.raises(ImportError):
        sglang_plugin.install()


def test_only_a_head_that_has_a_bias_loses_its_random_start():
    class Model(torch.nn.Module):
        def __init__(self, bias: bool):
            super().__init__()
            self.score = torch.nn.Linear(4, 1, bias=bias)

    torch.manual_seed(0)
    model, bare = Model(bias=True), Model(bias=False)
    assert model.score.bias.item() != 0
    before = model.score.weight.clone()
    for each in (model, bare, torch.nn.Linear(2, 2)):
        sglang_plugin.clear_bias(each)
    assert model.score.bias.item() == 0 and torch.equal(model.score.weight, before)
