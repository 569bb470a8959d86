"""Shapes of models that people ask about by name, from their published ``config.json``."""

from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from rlhf_mp.errors import ConfigError, Problem
from rlhf_mp.planner.hf_config import LAYER_NORM_BIASES, read_shape
from rlhf_mp.planner.model_shape import ModelShape


def _shape(name: str, layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, **traits) -> ModelShape:
    head_dim = traits.pop("head_dim", hidden // heads)
    return ModelShape(name, layers, hidden, heads, kv, head_dim, ffn, vocab, **traits)


def _gpt2(name: str, layers: int, hidden: int, heads: int) -> ModelShape:
    return _shape(name, layers, hidden, heads, heads, 4 * hidden, 50257, tied=True, positions=1024, **LAYER_NORM_BIASES)


QWEN2 = {"qkv_bias": True}
_SHAPES = (
    _shape("Qwen2.5-0.5B", 24, 896, 14, 2, 4864, 151936, tied=True, **QWEN2),
    _shape("Qwen2.5-1.5B", 28, 1536, 12, 2, 8960, 151936, tied=True, **QWEN2),
    _shape("Qwen2.5-3B", 36, 2048, 16, 2, 11008, 151936, tied=True, **QWEN2),
    _shape("Qwen2.5-7B", 28, 3584, 28, 4, 18944, 152064, **QWEN2),
    _shape("Qwen2.5-14B", 48, 5120, 40, 8, 13824, 152064, **QWEN2),
    _shape("Qwen2.5-32B", 64, 5120, 40, 8, 27648, 152064, **QWEN2),
    _shape("Qwen2.5-72B", 80, 8192, 64, 8, 29568, 152064, **QWEN2),
    _shape("Qwen3-0.6B", 28, 1024, 16, 8, 3072, 151936, tied=True, qk_norm=True, head_dim=128),
    _shape("Qwen3-1.7B", 28, 2048, 16, 8, 6144, 151936, tied=True, qk_norm=True, head_dim=128),
    _shape("Qwen3-4B", 36, 2560, 32, 8, 9728, 151936, tied=True, qk_norm=True, head_dim=128),
    _shape("Qwen3-8B", 36, 4096, 32, 8, 12288, 151936, qk_norm=True, head_dim=128),
    _shape("Qwen3-14B", 40, 5120, 40, 8, 17408, 151936, qk_norm=True, head_dim=128),
    _shape("Qwen3-32B", 64, 5120, 64, 8, 25600, 151936, qk_norm=True, head_dim=128),
    _shape("Llama-3.2-1B", 16, 2048, 32, 8, 8192, 128256, tied=True),
    _shape("Llama-3.2-3B", 28, 3072, 24, 8, 8192, 128256, tied=True),
    _shape("Llama-3.1-8B", 32, 4096, 32, 8, 14336, 128256),
    _shape("Llama-3.1-70B", 80, 8192, 64, 8, 28672, 128256),
    _shape("Llama-3.1-405B", 126, 16384, 128, 8, 53248, 128256),
    _shape("Llama-2-7B", 32, 4096, 32, 32, 11008, 32000),
    _shape("Llama-2-13B", 40, 5120, 40, 40, 13824, 32000),
    _shape("Llama-2-70B", 80, 8192, 64, 8, 28672, 32000),
    _shape("Mistral-7B", 32, 4096, 32, 8, 14336, 32000),
    _shape("Gemma-2B", 18, 2048, 8, 1, 16384, 256000, tied=True, head_dim=256),
    _shape("Gemma-7B", 28, 3072, 16, 16, 24576, 256000, tied=True, head_dim=256),
    _shape("Gemma-2-9B", 42, 3584, 16, 8, 14336, 256000, tied=True, head_dim=256, norms_per_layer=4),
    _gpt2("GPT-2", 12, 768, 12),
    _gpt2("GPT-2-medium", 24, 1024, 16),
    _gpt2("GPT-2-large", 36, 1280, 20),
    _gpt2("GPT-2-XL", 48, 1600, 25),
    _shape("OPT-1.3B", 24, 2048, 32, 32, 8192, 50272, tied=True, positions=2050, **LAYER_NORM_BIASES),
    _shape("Phi-2", 32, 2560, 32, 32, 10240, 51200, norms_per_layer=1, head_bias=True, **LAYER_NORM_BIASES),
)
KNOWN_MODELS = {shape.name.lower(): shape for shape in _SHAPES}


def find_model(name: str) -> ModelShape:
    """A known model by name (any case, with or without its organisation), or the one a path describes.

    Raises:
        ConfigError: neither a known name nor a readable config.json.
    """
    path = Path(name).expanduser()
    if path.exists():
        return replace(read_shape(path), name=path.parent.name if path.is_file() else path.name)
    if path.suffix == ".json" or name.startswith(("/", ".", "~")):
        raise ConfigError([Problem("model", name, "there is no such file or folder", "correct the path")])
    key = name.rpartition("/")[2].lower().removesuffix("-instruct")
    if key in KNOWN_MODELS:
        return KNOWN_MODELS[key]
    close = get_close_matches(key, KNOWN_MODELS, n=3, cutoff=0.3)
    nearest = ", ".join(KNOWN_MODELS[k].name for k in close) or ", ".join(shape.name for shape in _SHAPES)
    raise ConfigError(
        [Problem("model", name, "neither a known model nor a path", f"a config.json, or one of: {nearest}")]
    )
