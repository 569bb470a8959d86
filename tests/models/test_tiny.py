"""Models made from nothing are real checkpoints: any program of the field reads them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoTokenizer

from rlhf_mp.models.hf import load_causal_lm
from rlhf_mp.models.tiny import TinyShape, byte_pair_tokenizer, character_tokenizer, make_checkpoint

SHAPE = TinyShape(hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16)
CHARACTERS = "0123456789+="
CHARACTER = character_tokenizer(CHARACTERS)
BYTE_PAIR = byte_pair_tokenizer(["Natalia sold clips to 48 of her friends in April."] * 3, vocab_size=300)


@given(st.text(CHARACTERS))
def test_a_character_is_a_token(text):
    ids = CHARACTER.encode(text)
    assert len(ids) == len(text) and CHARACTER.decode(ids) == text
    assert CHARACTER.decode([*ids, CHARACTER.eos_token_id], skip_special_tokens=True) == text


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_byte_pairs_give_any_text_back(text):
    assert BYTE_PAIR.decode(BYTE_PAIR.encode(text)) == text


def test_byte_pairs_shorten_what_they_were_trained_on():
    assert len(BYTE_PAIR.encode("Natalia sold clips")) < len("Natalia sold clips") / 2


def test_the_chat_template_of_each_kind():
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2="}]
    assert CHARACTER.apply_chat_template(messages[1:], tokenize=False, add_generation_prompt=True) == "1+2="
    rendered = BYTE_PAIR.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "system: Add.\nuser: 1+2=\nassistant: "


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_has_the_shape_asked_for(tmp_path, tied):
    make_checkpoint(tmp_path, CHARACTER, replace(SHAPE, tied=tied), std=0.1)
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (32, 2, 32)  # 14 rounded up
    assert config.eos_token_id == AutoTokenizer.from_pretrained(tmp_path).eos_token_id == 1
    model = load_causal_lm(str(tmp_path), torch.float32)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.model.layers[0].mlp.up_proj.weight.std().item() == pytest.approx(0.1, rel=0.1)


def test_the_seed_decides_the_weights(tmp_path):
    for name, seed in {"a": 1, "again": 1, "b": 2}.items():
        make_checkpoint(tmp_path / name, CHARACTER, SHAPE, seed=seed)
    a, again, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "again", "b"))
    assert a == again != b
