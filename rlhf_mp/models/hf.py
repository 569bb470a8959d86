"""Hugging Face checkpoints: read a model from one, write one that others can read."""

import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from rlhf_mp.models.packed_attention import attention_for, check_packing
from rlhf_mp.models.quantized import as_it_trains, quantized_loading

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHARD_BYTES = 5_000_000_000
# Everything beside the weights that a reader of the checkpoint may want.
COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")
WEIGHT_INDEXES = {"model.safetensors.index.json", "pytorch_model.bin.index.json"}


class Loading(TypedDict, total=False):
    """How a checkpoint's model is read; what is left out is as in ``load_causal_lm``."""

    attention: str  # how it is computed, see packed_attention.py
    quantization: str | None  # of the matrices of its layers, see quantized.py; such a model is not trained itself
    trust_remote_code: bool


def load_causal_lm(
    path: str,
    dtype: torch.dtype,
    *,
    packed: bool = False,
    attention: str = "auto",
    quantization: str | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """The model without dropout or cache, on CPU (or partitioned, under ZeRO-3).

    Args:
        packed: it will see rows of several sequences.
        attention, quantization: see ``Loading``.

    Raises:
        ValueError: such rows cannot be kept apart in this model.
    """
    config = without_dropout(AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code))
    model = AutoModelForCausalLM.from_pretrained(
        path,
        config=config,
        dtype=dtype,
        attn_implementation=attention_for(attention, dtype, packed=packed),
        trust_remote_code=trust_remote_code,
        **quantized_loading(quantization, dtype),
    )
    if packed:
        check_packing(model)
    model.config.use_cache = False
    return as_it_trains(model, dtype)


def without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """``config``, changed: engines sample without dropout, and log-probs of the same tokens would be others with it."""
    for name, value in config.to_dict().items():
        if re.search("dropout|pdrop", name) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def stop_token_ids(path: str, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool = False) -> list[int]:
    """Ids that end a response: the tokenizer's, and those the checkpoint's generation config adds."""
    ids = {tokenizer.eos_token_id} - {None}
    generation = Path(path) / "generation_config.json"
    sources = [json.loads(generation.read_text())] if generation.exists() else []
    sources.append(AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).to_dict())
    for source in sources:
        eos = source.get("eos_token_id")
        ids |= set(eos if isinstance(eos, list) else [eos]) - {None}
    return sorted(ids)


def as_it_is(config: dict[str, Any]) -> dict[str, Any]:
    return config


def save_checkpoint(
    weights: Iterable[tuple[str, Tensor]],
    source: str,
    directory: Path,
    dtype: torch.dtype,
    saved_config: Callable[[dict[str, Any]], dict[str, Any]] = as_it_is,
) -> None:
    """Write ``weights`` as safetensors shards, with config and tokenizer copied from the checkpoint ``source``.

    Args:
        weights: full tensors under Hugging Face names; each is copied before the next is asked for.
        saved_config: from the config.json of ``source`` to the one written; a model with another head has another.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    used, index, files = 0, {}, []

    def flush() -> None:
        files.append(f"model-{len(files) + 1:05d}.safetensors")
        save_file(shards[0], directory / files[-1], metadata={"format": "pt"})
        index.update({name: files[-1] for name in shards[0]})
        shards[0] = {}

    total = 0
    for name, tensor in weights:
        copy = tensor.detach().to("cpu", dtype, copy=True).contiguous()
        if shards[0] and used + copy.nbytes > SHARD_BYTES:
            flush()
            used = 0
        shards[0][name] = copy
        used += copy.nbytes
        total += copy.nbytes
    flush()
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
    )
    copy_companions(Path(source), directory, dtype, saved_config)


def copy_companions(
    source: Path, directory: Path, dtype: torch.dtype, saved_config: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Config, tokenizer, chat template, generation config: what makes a folder of weights a checkpoint."""
    for pattern in COMPANIONS:
        for file in source.glob(pattern):
            if file.name not in WEIGHT_INDEXES:
                shutil.copy2(file, directory / file.name)
    config_file = directory / "config.json"
    config = saved_config(json.loads(config_file.read_text()))
    config["dtype"] = str(dtype).removeprefix("torch.")
    config.pop("torch_dtype", None)  # the older spelling would contradict it
    config_file.write_text(json.dumps(config, indent=2))
