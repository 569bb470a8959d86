"""A model's shape from its Hugging Face ``config.json``."""

import json
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rlhf_mp.errors import ConfigError, Problem
from rlhf_mp.planner.model_shape import ModelShape


class _Fields:
    """Reads a config's entries and remembers which are missing or no counts, so that all are reported at once."""

    def __init__(self, config: dict[str, Any], source: str):
        self.config, self.source = config, source
        self.missing: list[str] = []
        self.no_counts: list[str] = []

    def number(self, *names: str, default: int | None = None) -> int:
        """The first of ``names`` that is there. ``default`` is what the architecture itself means by absence."""
        for name in names:
            if name in self.config and (value := self.config[name]) is not None:
                if isinstance(value, int) and value >= 1:
                    return value
                self.no_counts.append(name)
                return 1  # never used: the entry raises
        if default is None:
            self.missing.append(names[0])
            return 1  # never used: the missing name raises
        return default

    def flag(self, name: str, absent: bool) -> bool:
        return bool(self.config[name]) if name in self.config and self.config[name] is not None else absent


def _llama_like(fields: _Fields, *, tied: bool = False, **traits: Any) -> dict[str, Any]:
    hidden, heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    return {
        "layers": fields.number("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": fields.number("num_key_value_heads", default=heads),
        "head_dim": fields.number("head_dim", default=hidden // heads),
        "ffn": fields.number("intermediate_size"),
        "vocab": fields.number("vocab_size"),
        "tied": fields.flag("tie_word_embeddings", tied),
        "max_context": fields.number("max_position_embeddings", default=0) or None,
    } | traits


def _llama(fields: _Fields) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    return _llama_like(fields, qkv_bias=bias, out_bias=bias, mlp_bias=fields.flag("mlp_bias", False))


def _qwen3(fields: _Fields) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    # absent head_dim means 128 in this family, not hidden / heads
    shape = _llama_like(fields, qkv_bias=bias, out_bias=bias, qk_norm=True)
    return shape | {"head_dim": fields.number("head_dim", default=128)}


def _gemma(norms: int, qk_norm: bool) -> Callable[[_Fields], dict[str, Any]]:
    def shape(fields: _Fields) -> dict[str, Any]:
        found = _llama_like(fields, tied=True, norms_per_layer=norms, qk_norm=qk_norm)
        return found | {"head_dim": fields.number("head_dim", default=256)}

    return shape


def _gpt2(fields: _Fields) -> dict[str, Any]:
    hidden, heads = fields.number("n_embd"), fields.number("n_head")
    return {
        "layers": fields.number("n_layer"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "ffn": fields.number("n_inner", default=4 * hidden),
        "vocab": fields.number("vocab_size"),
        "positions": fields.number("n_positions"),
        "tied": fields.flag("tie_word_embeddings", True),
        "max_context": fields.number("n_positions"),
        **LAYER_NORM_BIASES,
    }


def _opt(fields: _Fields) -> dict[str, Any]:
    heads, context = fields.number("num_attention_heads"), fields.number("max_position_embeddings")
    hidden = fields.number("hidden_size")
    return {
        "layers": fields.number("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "ffn": fields.number("ffn_dim"),
        "vocab": fields.number("vocab_size"),
        "positions": context + 2,  # two rows of padding, an old quirk
        "tied": fields.flag("tie_word_embeddings", True),
        "max_context": context,
        **LAYER_NORM_BIASES,
    }


def _phi(fields: _Fields) -> dict[str, Any]:
    return _llama_like(fields, norms_per_layer=1, head_bias=True, **LAYER_NORM_BIASES)


LAYER_NORM_BIASES = {"gated": False, "qkv_bias": True, "out_bias": True, "mlp_bias": True, "norm_vectors": 2}
READERS: dict[str, Callable[[_Fields], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _llama_like,
    "qwen2": lambda fields: _llama_like(fields, qkv_bias=True),
    "qwen3": _qwen3,
    "gemma": _gemma(2, qk_norm=False),
    "gemma2": _gemma(4, qk_norm=False),
    "gemma3_text": _gemma(4, qk_norm=True),
    "gpt2": _gpt2,
    "opt": _opt,
    "phi": _phi,
    "phi3": _llama_like,  # its fused matrices hold as many numbers as the separate ones
}


def shape_from_config(config: dict[str, Any], source: str) -> ModelShape:
    """The shape that ``config.json`` describes.

    Args:
        source: how to call the model in messages.

    Raises:
        ConfigError: an architecture the planner does not know, or entries that are missing.
    """
    if "model_type" not in config:
        raise ConfigError([Problem(source, sorted(config)[:8], "has no model_type", "name a model's config.json")])
    kind = config["model_type"]
    if kind not in READERS:
        close = get_close_matches(kind, READERS, n=1, cutoff=0.4)
        fix = f"known: {', '.join(sorted(READERS))}" + (f"; nearest: {close[0]}" if close else "")
        raise ConfigError([Problem(f"{source}: model_type", kind, "an architecture the planner can't count", fix)])
    fields = _Fields(config, source)
    shape = READERS[kind](fields)
    reasons = dict.fromkeys(fields.missing, f"a {kind} model is not described without it")
    reasons |= dict.fromkeys(fields.no_counts, "is no number of at least 1")
    if reasons:
        fix = "take the config.json that belongs to the weights"
        raise ConfigError([Problem(f"{source}: {n}", config.get(n), reason, fix) for n, reason in reasons.items()])
    return ModelShape(source, **shape)


def read_shape(path: Path) -> ModelShape:
    """From a ``config.json`` or the folder that holds one.

    Raises:
        ConfigError: unreadable, unknown or incomplete.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            [Problem("model", str(path), f"no readable config.json: {error}", "correct the path")]
        ) from None
    if not isinstance(config, dict):
        raise ConfigError([Problem(str(file), type(config).__name__, "not a mapping", "name a model's config.json")])
    return shape_from_config(config, str(path))
