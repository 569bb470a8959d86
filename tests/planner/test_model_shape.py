"""Parameters are counted exactly: against published counts and against the models transformers builds."""

from dataclasses import replace

import pytest

from rlhf_mp.errors import ConfigError
from rlhf_mp.planner.hf_config import READERS, read_shape, shape_from_config
from rlhf_mp.planner.known_models import KNOWN_MODELS, find_model

# Numbers of elements in the published checkpoints (safetensors headers; GPT-2, OPT and Phi: their model cards).
PUBLISHED = {
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-32B": 32_762_123_264,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "Llama-2-7B": 6_738_415_616,
    "Llama-2-13B": 13_015_864_320,
    "Llama-2-70B": 68_976_648_192,
    "Mistral-7B": 7_241_732_096,
    "Gemma-2B": 2_506_172_416,
    "Gemma-7B": 8_537_680_896,
    "Gemma-2-9B": 9_241_705_984,
    "GPT-2": 124_439_808,
    "GPT-2-medium": 354_823_168,
    "GPT-2-large": 774_030_080,
    "OPT-1.3B": 1_315_758_080,
    "Phi-2": 2_779_683_840,
}

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
SMALL |= {"intermediate_size": 112, "max_position_embeddings": 40, "head_dim": 16}
ARCHITECTURES = {
    "llama": SMALL | {"attention_bias": True, "mlp_bias": True},
    "mistral": SMALL,
    "qwen2": SMALL,
    "qwen3": SMALL | {"head_dim": 32, "tie_word_embeddings": True},
    "gemma": SMALL,
    "gemma2": SMALL,
    "gemma3_text": SMALL,
    "phi": SMALL | {"num_key_value_heads": 4},
    "phi3": SMALL | {"pad_token_id": 0},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 96, "n_positions": 40},
    "opt": {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "ffn_dim": 112,
        "vocab_size": 96,
        "max_position_embeddings": 40,
        "word_embed_proj_dim": 64,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_equal_the_published_ones(name):
    assert KNOWN_MODELS[name.lower()].num_params == PUBLISHED[name]


def test_a_llama_layer_by_hand():
    # 2 of 4096^2 (q, o), 2 of 4096 x 1024 (k, v), 3 of 4096 x 14336, 2 norms of 4096
    by_hand = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    assert find_model("llama-3.1-8b").layer_params == by_hand == 218_112_000


def test_every_architecture_is_compared_with_transformers():
    assert ARCHITECTURES.keys() == READERS.keys()


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_counts_equal_the_models_that_transformers_builds(kind):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **ARCHITECTURES[kind])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    counted = sum(parameter.numel() for parameter in model.parameters())  # a tied matrix comes once
    assert shape_from_config(config.to_dict(), "built").num_params == counted


def test_a_critic_has_one_output_instead_of_a_vocabulary():
    shape = find_model("llama-3.1-8b")
    assert shape.num_params - shape.num_params_scalar_head == (128_256 - 1) * 4096


def test_a_name_is_found_in_any_case_with_organisation_and_suffix():
    assert find_model("Qwen/Qwen2.5-7B-Instruct") is find_model("qwen2.5-7b")


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="Llama-3.1-8B"):
        find_model("lama-3.1-8b")


def test_a_folder_and_its_config_json_mean_the_same(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 5, "n_positions": 4}'
    )
    assert replace(read_shape(tmp_path), name="") == replace(read_shape(tmp_path / "config.json"), name="")


def test_all_missing_fields_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        shape_from_config({"model_type": "llama", "hidden_size": 64, "vocab_size": 10}, "m/config.json")
    text = str(caught.value)
    assert all(name in text for name in ("num_hidden_layers", "num_attention_heads", "intermediate_size"))


def test_an_unknown_architecture_names_the_nearest_known_one():
    with pytest.raises(ConfigError, match="nearest: qwen3"):
        shape_from_config({"model_type": "qwen3_next"}, "m")


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"hidden_size": 3}'])
def test_a_file_that_is_no_model_config_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError):
        read_shape(tmp_path)
