"""Adapters: what is frozen, what is merged, what is written; peft's own functions are the second implementation."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from rlhf_mp.config.schema import ModelConfig
from rlhf_mp.errors import ConfigError
from rlhf_mp.models.heads import Head, PolicyHead, RewardHead, ValueHead
from rlhf_mp.models.lora import add_adapter, save_adapter, without_adapter
from rlhf_mp.models.merge import adapter_tensors, checkpoint_tensors

TOKENS = torch.tensor([[4, 9, 12, 6, 7, 13, 2, 5]])
LINEAR = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def adapted(path, head: Head | None = None, dtype: str = "float32", *, moved: bool = True, **knobs) -> nn.Module:
    """With weights of the adapter that say something, unless they are to be as they begin."""
    head = head or PolicyHead()
    model = ModelConfig(str(path), dtype=dtype, **{"lora_rank": 4, "lora_alpha": 12} | knobs)
    module = head.load(str(path), getattr(torch, dtype))
    decoder = module.model
    add_adapter(module, decoder.layers, model, head, getattr(torch, dtype))
    if moved:
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return module.eval()


@torch.no_grad()
def logits(module: nn.Module) -> torch.Tensor:
    return module(input_ids=TOKENS).logits


def full(module: nn.Module) -> dict[str, torch.Tensor]:
    return {tensor.name: tensor.value().detach().clone() for tensor in checkpoint_tensors(module)}


def test_an_adapter_begins_as_nothing_and_is_all_that_is_trained(tiny_checkpoint):
    module = adapted(tiny_checkpoint, moved=False)
    base = PolicyHead().load(str(tiny_checkpoint), torch.float32)
    assert torch.equal(logits(module), logits(base))
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert {name.split(".")[-4] for name in trained} == set(LINEAR)
    assert len(trained) == 2 * 4 * len(LINEAR)  # A and B of seven matrices in four layers
    assert module.state_dict().keys() == trained  # tied head and frozen base are in no checkpoint


def test_a_state_dict_is_read_back_strictly(tiny_checkpoint):
    first, second = adapted(tiny_checkpoint), adapted(tiny_checkpoint, moved=False)
    second.load_state_dict(first.state_dict())
    assert torch.equal(logits(second), logits(first))
    state = first.state_dict()
    state.popitem()
    with pytest.raises(RuntimeError, match="Missing key"):
        second.load_state_dict(state)
    with pytest.raises(RuntimeError, match="size mismatch"):
        adapted(tiny_checkpoint, lora_rank=8).load_state_dict(first.state_dict())


def test_merged_weights_compute_what_base_and_adapter_do(tiny_checkpoint):
    module = adapted(tiny_checkpoint)
    merged = PolicyHead().load(str(tiny_checkpoint), torch.float32)
    assert full(module).keys() == dict(merged.named_parameters()).keys()
    base = logits(merged)
    merged.load_state_dict(full(module), strict=False)  # the tied head comes once
    torch.testing.assert_close(logits(merged), logits(module), atol=1e-4, rtol=0)
    assert (logits(module) - base).abs().max() > 0.5


def test_a_merged_matrix_by_hand(tiny_checkpoint):
    module = adapted(tiny_checkpoint, target_modules=["v_proj"])
    layer = module.model.layers[1].self_attn.v_proj
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = layer.base_layer.weight.double() + 12 / 4 * up.double() @ down.double()
    found = full(module)
    torch.testing.assert_close(found["model.layers.1.self_attn.v_proj.weight"].double(), expected, atol=1e-6, rtol=0)
    assert torch.equal(found["model.layers.1.self_attn.q_proj.weight"], module.model.layers[1].self_attn.q_proj.weight)


def test_merging_in_bfloat16_rounds_once_and_leaves_the_base_as_it_is(tiny_checkpoint):
    module = adapted(tiny_checkpoint, dtype="bfloat16")
    layer = module.model.layers[0].mlp.up_proj
    before, first = layer.base_layer.weight.clone(), full(module)
    for _ in range(3):
        again = full(module)
    assert torch.equal(layer.base_layer.weight, before)
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    down, up = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
    exact = before.double() + 3 * up @ down
    found = first["model.layers.0.mlp.up_proj.weight"]
    assert found.dtype == torch.float32 and (found.double() - exact).abs().max() < 1e-6
    assert (exact.bfloat16().double() - exact).abs().max() > 1e-4  # what is left to round, once


def test_without_its_adapter_a_model_is_its_base_to_the_last_bit(tiny_checkpoint):
    module, base = adapted(tiny_checkpoint), PolicyHead().load(str(tiny_checkpoint), torch.float32)
    with_adapter = logits(module)
    with without_adapter(module):
        assert torch.equal(logits(module), logits(base))
    assert torch.equal(logits(module), with_adapter)
    with pytest.raises(ZeroDivisionError), without_adapter(module):
        raise ZeroDivisionError
    assert torch.equal(logits(module), with_adapter)
    assert all(p.requires_grad == ("lora_" in name) for name, p in module.named_parameters())


def test_peft_reads_the_adapter_and_merges_to_the_same(tiny_checkpoint, tmp_path):
    module = adapted(tiny_checkpoint, target_modules=["q_proj", "down_proj"])
    save_adapter(((t.name, t.value()) for t in adapter_tensors(module)), module, tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32, attn_implementation="sdpa")
    theirs = PeftModel.from_pretrained(base, tmp_path).eval()
    torch.testing.assert_close(logits(theirs), logits(module), atol=1e-6, rtol=0)
    assert theirs.peft_config["default"].base_model_name_or_path == str(tiny_checkpoint)
    merged, ours = dict(theirs.merge_and_unload().named_parameters()), full(module)
    assert merged.keys() == ours.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, merged[name], atol=1e-6, rtol=0)


def test_all_linear_is_what_peft_understands_by_it(tiny_checkpoint):
    theirs = get_peft_model(
        PolicyHead().load(str(tiny_checkpoint), torch.float32),
        LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    expected = {name.removeprefix("base_model.model.") for name, p in theirs.named_parameters() if p.requires_grad}
    assert {name for name, p in adapted(tiny_checkpoint).named_parameters() if p.requires_grad} == expected


@pytest.mark.parametrize("head", [ValueHead(), RewardHead()])
def test_a_head_that_the_checkpoint_lacks_is_trained_and_kept_with_the_adapter(tiny_checkpoint, head):
    module = adapted(tiny_checkpoint, head)
    kept = {name for name in module.state_dict() if "lora_" not in name}
    assert kept == {"score.weight"} | ({"score.bias"} if head.bias else set())
    assert "score.weight" in full(module)


def test_peft_reads_a_critics_adapter_with_its_head(tiny_checkpoint, tmp_path):
    module = adapted(tiny_checkpoint, ValueHead())
    save_adapter(((t.name, t.value()) for t in adapter_tensors(module)), module, tmp_path)
    base = AutoModelForTokenClassification.from_pretrained(tiny_checkpoint, dtype=torch.float32, num_labels=1)
    theirs = PeftModel.from_pretrained(base, tmp_path).eval()
    with torch.no_grad():
        values = module(input_ids=TOKENS)
    torch.testing.assert_close(logits(theirs), values, atol=1e-5, rtol=0)
    assert values.abs().max() > 0.1


@pytest.mark.parametrize("targets", [["lm_head"], ["q_proj", "query"], ["embed_tokens"]])
def test_a_layer_that_cannot_have_an_adapter_is_told_with_those_that_can(tiny_checkpoint, targets):
    with pytest.raises(ConfigError, match="down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"):
        adapted(tiny_checkpoint, target_modules=targets)
