"""A model that plans are made of."""

import json
from pathlib import Path

import pytest

QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint's folder as far as a plan reads it."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    return tmp_path
