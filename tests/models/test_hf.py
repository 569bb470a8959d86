"""Checkpoints others can read: what is written loads with transformers alone and computes the same."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from rlhf_mp.models import hf
from rlhf_mp.models.hf import load_causal_lm, load_tokenizer, save_checkpoint, stop_token_ids
from rlhf_mp.models.tiny import TinyShape, character_tokenizer, make_checkpoint

TOKENS = torch.tensor([[4, 9, 12, 6, 7, 13]])
SHAPE = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def source(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    make_checkpoint(folder, character_tokenizer("0123456789+="), TinyShape(**SHAPE, tied=request.param), std=0.2)
    return folder


@pytest.fixture
def trained(source) -> torch.nn.Module:
    """The model of ``source`` with every weight moved."""
    model = load_causal_lm(str(source), torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 0.3 * torch.randn(weight.shape, generator=generator))
    return model.eval()


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model.eval()(input_ids=TOKENS).logits


def test_a_written_checkpoint_computes_the_same_in_another_program(trained, source, tmp_path):
    save_checkpoint(trained.named_parameters(), str(source), tmp_path, torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded), logits(trained))
    assert (logits(load_causal_lm(str(source), torch.float32)) - logits(trained)).abs().max() > 0.1


def test_the_tokenizer_and_its_template_come_along(trained, source, tmp_path):
    save_checkpoint(trained.named_parameters(), str(source), tmp_path, torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("12+7=") == load_tokenizer(str(source)).encode("12+7=")
    assert tokenizer.chat_template == load_tokenizer(str(source)).chat_template
    assert (tmp_path / "generation_config.json").read_text() == (source / "generation_config.json").read_text()


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_weights_are_stored_in_the_type_the_config_names(trained, source, tmp_path, name):
    save_checkpoint(trained.named_parameters(), str(source), tmp_path, hf.DTYPES[name])
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == name and "torch_dtype" not in config
    stored = load_file(tmp_path / "model-00001.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {hf.DTYPES[name]}
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == hf.DTYPES[name]


def trained_bytes(model: torch.nn.Module, names) -> list[int]:
    """Sizes of the named weights in the model's order."""
    return [weight.nbytes for name, weight in model.named_parameters() if name in names]


def test_a_large_model_is_cut_into_shards_of_bounded_size(trained, source, tmp_path, monkeypatch):
    limit = 10_000  # smaller than the larger matrices, which then have a shard of their own
    monkeypatch.setattr(hf, "SHARD_BYTES", limit)
    save_checkpoint(trained.named_parameters(), str(source), tmp_path, torch.float32)
    shards = {file.name: load_file(file) for file in tmp_path.glob("*.safetensors")}
    assert len(shards) > 3
    for tensors in shards.values():
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= limit
    sizes = [sum(t.nbytes for t in shards[name].values()) for name in sorted(shards)]
    first_of = [next(iter(trained_bytes(trained, shards[name]))) for name in sorted(shards)]
    assert all(size + after > limit for size, after in zip(sizes, first_of[1:], strict=False))  # none too many
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file, tensors in shards.items() for name in tensors}
    assert index["metadata"]["total_size"] == sum(t.nbytes for tensors in shards.values() for t in tensors.values())
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(trained))


def test_each_tensor_is_copied_before_the_next_is_asked_for(source, tmp_path):
    """Engines reuse the memory of a gathered tensor."""
    model = load_causal_lm(str(source), torch.float32)

    def one_buffer():
        buffer = torch.empty(max(p.numel() for p in model.parameters()))
        for name, weight in model.named_parameters():
            view = buffer[: weight.numel()].view(weight.shape)
            view.copy_(weight.detach())
            yield name, view

    save_checkpoint(one_buffer(), str(source), tmp_path, torch.float32)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


def test_a_model_with_dropout_is_trained_without_it(tmp_path):
    """The tokens were sampled without: with dropout, ratios of new to old log-probs would be noise."""
    config = GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path), torch.float32).train()
    first, second = (model(input_ids=TOKENS).logits for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("in_generation_config", "expected"),
    [(None, [1]), (7, [1, 7]), ([7, 5], [1, 5, 7])],
    ids=["none", "one", "several"],
)
def test_responses_end_at_every_token_the_checkpoint_knows_as_an_end(tmp_path, in_generation_config, expected):
    tokenizer = character_tokenizer("0123456789")
    make_checkpoint(tmp_path, tokenizer, TinyShape(**SHAPE))
    generation = {} if in_generation_config is None else {"eos_token_id": in_generation_config}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert stop_token_ids(str(tmp_path), load_tokenizer(str(tmp_path))) == expected


def test_an_end_token_may_be_known_to_the_tokenizer_alone(tmp_path):
    make_checkpoint(tmp_path, character_tokenizer("0123456789"), TinyShape(**SHAPE))
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    assert stop_token_ids(str(tmp_path), load_tokenizer(str(tmp_path))) == [1]
