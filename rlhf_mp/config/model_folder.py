"""Is a folder a Hugging Face checkpoint this run can use? Reads small JSON files and safetensors headers only."""

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_mp.config import megatron_checks
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.errors import Absent, Problem

KEY, CRITIC_KEY = "actor_rollout_ref.model.path", "critic.model.path"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def model_problems(config: RunConfig) -> Iterator[Problem]:
    """What keeps ``model.path`` from being trained, served and given prompts."""
    path = config.actor_rollout_ref.model.path
    if not path:
        yield Problem(KEY, path, "there is no model to train", f"{KEY}=<a Hugging Face checkpoint folder>")
        return
    folder = Path(path)
    if not folder.is_dir():
        yield Absent(KEY, path, "there is no such folder; models are not downloaded during a run", _how_to_get(path))
        return
    yield from _missing_files(folder)
    if config.data.apply_chat_template:
        yield from _template_problems(folder)
    if (folder / "config.json").is_file():
        yield from _shape_problems(folder / "config.json", config)


def critic_problems(config: RunConfig) -> Iterator[Problem]:
    """What keeps ``critic.model.path`` from giving values to the actor's tokens. Nothing where it is the actor's."""
    path, actors = config.critic.model.path, config.actor_rollout_ref.model.path
    if not config.critic.enable or path == actors:
        return
    folder = Path(path)
    if not folder.is_dir():
        reason = "there is no such folder; models are not downloaded during a run"
        yield Absent(CRITIC_KEY, path, reason, _how_to_get(path, CRITIC_KEY))
        return
    yield from _missing_files(folder, CRITIC_KEY)
    try:
        model, actor = (json.loads((Path(p) / "config.json").read_text()) for p in (path, actors))
    except (OSError, ValueError):  # said above, or of the actor's folder
        return
    if config.critic.strategy == "megatron":
        yield from megatron_checks.shape_problems(config.trained[1], path, model)
    if model.get("vocab_size") != actor.get("vocab_size"):
        yield Problem(
            CRITIC_KEY,
            path,
            f"its vocabulary has {model.get('vocab_size')} tokens, the actor's {actor.get('vocab_size')}: "
            "the critic reads the actor's tokens",
            f"a model of the actor's family, or {CRITIC_KEY}={actors}",
        )


def _how_to_get(path: str, key: str = KEY) -> str:
    if path.count("/") == 1 and not path.startswith((".", "~", "/", "runs/")):  # looks like a name on the hub
        local = f"models/{path.rpartition('/')[2]}"
        return f"hf download {path} --local-dir {local}, then {key}={local}"
    return "create it, or correct the path (relative paths start where you type the command)"


def _missing_files(folder: Path, key: str = KEY) -> Iterator[Problem]:
    if not (folder / "config.json").is_file():
        yield Problem(key, str(folder), "the folder has no config.json", "name the folder that holds it")
    if not [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]:
        reason = "no weights: neither *.safetensors nor pytorch_model*.bin"
        yield Problem(key, str(folder), reason, _download_again(folder))
    for index in (folder / name for name in INDEX_FILES if (folder / name).is_file()):
        try:
            shards = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError) as error:
            yield Problem(str(index), "unreadable", f"no index of weights: {error}", _download_again(folder))
            continue
        lost = sorted(name for name in shards if not (folder / name).is_file())
        if lost:
            reason = f"{len(lost)} weight file(s) missing, first {lost[0]}"
            yield Problem(key, str(folder), reason, _download_again(folder))
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        yield Problem(key, str(folder), f"no tokenizer: none of {', '.join(TOKENIZER_FILES)}", _download_again(folder))


def _download_again(folder: Path) -> str:
    return f"download or save the whole checkpoint again: hf download <name> --local-dir {folder}"


def _template_problems(folder: Path) -> Iterator[Problem]:
    settings = folder / "tokenizer_config.json"
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return
    if settings.is_file():
        try:
            if "chat_template" in json.loads(settings.read_text()):
                return
        except ValueError as error:
            yield Problem(str(settings), "unreadable", f"not JSON: {error}", _download_again(folder))
            return
    yield Problem(
        "data.apply_chat_template",
        True,
        f"the tokenizer in {folder} has no chat template; base models have none",
        f"data.apply_chat_template=false, or put a chat_template.jinja into {folder}",
    )


def _shape_problems(path: Path, config: RunConfig) -> Iterator[Problem]:
    """Limits that the architecture sets to the run."""
    try:
        model: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        yield Problem(str(path), "unreadable", f"not JSON: {error}", "correct or download it again")
        return
    actor = config.trained[0]
    if actor.updates.strategy == "megatron":
        yield from megatron_checks.shape_problems(actor, str(path.parent), model)
    rollout, samples = config.actor_rollout_ref.rollout, config.trainer.task == "rl"
    key, length, what = "data.max_length", config.data.max_length, "data.max_length"
    if samples:
        key, length = "actor_rollout_ref.rollout.max_model_len", rollout.max_model_len
        what = "data.max_prompt_length + data.max_response_length"
    if "max_position_embeddings" in model and length > model["max_position_embeddings"]:
        limit = model["max_position_embeddings"]
        reason = f"the model's context ends at {limit} tokens (max_position_embeddings in {path})"
        yield Problem(key, length, reason, f"{what} of at most {limit}")
    tp = rollout.tensor_model_parallel_size if samples else 1
    if "num_attention_heads" in model and model["num_attention_heads"] % tp:
        heads = model["num_attention_heads"]
        yield Problem(
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
            tp,
            f"does not divide the model's {heads} attention heads",
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={math.gcd(heads, tp)}",
        )


def stored_shapes(folder: Path) -> dict[str, list[int]]:
    """Shapes of the tensors in a checkpoint's safetensors files, by name, from their headers; empty if it has none.

    Source: the format starts with the header's length as a little-endian uint64, then that much JSON
    (huggingface.co/docs/safetensors).
    """
    shapes = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        shapes |= {name: tensor["shape"] for name, tensor in header.items() if name != "__metadata__"}
    return shapes


def count_parameters(folder: Path) -> int | None:
    """Numbers stored in a checkpoint's safetensors files; None if it has none."""
    return sum(map(math.prod, stored_shapes(folder).values())) or None
