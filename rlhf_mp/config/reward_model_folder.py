"""Is a folder a reward model that fits the policy? Reads small JSON files only."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_mp.config.schema import RunConfig
from rlhf_mp.errors import Absent, Problem

KEY = "reward_model.model.path"
TRAIN = "train one: trainer.task=reward_model; its run directory holds it as huggingface/"
SERVED = {
    "Gemma2ForSequenceClassification", "LlamaForSequenceClassification",
    "Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification",
}  # fmt: skip
"""Decoders that SGLang has with one output, read off the last token; a test compares with SGLang's own list."""
VOCABULARIES = ("tokenizer.json", "vocab.json", "tokenizer.model", "vocab.txt")


def reward_model_problems(config: RunConfig) -> Iterator[Problem]:
    """What keeps ``reward_model.model.path`` from scoring the policy's responses."""
    own, policy = config.reward_model, Path(config.actor_rollout_ref.model.path)
    if not own.enable or not own.model.path:  # task_checks.py says so
        return
    folder = Path(own.model.path)
    if not folder.is_dir():
        yield Absent(KEY, own.model.path, "there is no such folder", TRAIN)
        return
    try:
        model: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        yield Problem(KEY, own.model.path, f"its config.json cannot be read: {error}", TRAIN)
        return
    kind = ", ".join(model.get("architectures") or ["nothing"])
    if "ForSequenceClassification" not in kind:
        yield Problem(KEY, own.model.path, f"a checkpoint of {kind}: it has no head that gives a score", TRAIN)
    labels = len(model.get("id2label", {"0": "", "1": ""}))  # transformers writes no labels when there are two
    if "ForSequenceClassification" in kind and labels != 1:
        yield Problem(KEY, own.model.path, f"it tells {labels} classes apart, and a reward is one number", TRAIN)
    yield from _server_problems(config, model)
    if policy.is_dir() and (differs := _different_vocabulary(folder, policy)):
        yield Problem(
            KEY,
            own.model.path,
            f"its {differs} is not that of the policy {policy}: token ids would mean other texts to it",
            "a reward model trained from a model of the policy's family, with the same tokenizer",
        )


def _server_problems(config: RunConfig, model: dict[str, Any]) -> Iterator[Problem]:
    """What keeps SGLang from serving it."""
    own = config.reward_model
    if not own.served:
        return
    kinds = model.get("architectures") or ["nothing"]
    if not SERVED.intersection(kinds):
        reason = f"SGLang gives no score of {', '.join(kinds)}, only of {', '.join(sorted(SERVED))}"
        fix = "reward_model.strategy=actor: the training ranks score with any of them"
        yield Problem("reward_model.strategy", own.strategy, reason, fix)
    width, heads = own.rollout.tensor_model_parallel_size, model.get("num_attention_heads", 0)
    if heads % width:
        key, reason = "reward_model.rollout.tensor_model_parallel_size", f"does not divide its {heads} attention heads"
        yield Problem(key, width, reason, f"{key}={math.gcd(heads, width)}")


def _different_vocabulary(one: Path, other: Path) -> str | None:
    """The file in which two tokenizers differ; None if they agree, or have no file in common to compare."""
    for name in VOCABULARIES:
        if (one / name).is_file() and (other / name).is_file():
            return None if _vocabulary(one / name) == _vocabulary(other / name) else name
    return None


def _vocabulary(file: Path) -> Any:
    """What decides which ids a text becomes."""
    if file.name != "tokenizer.json":
        return file.read_bytes()
    tokenizer = json.loads(file.read_text())
    added = [(token["id"], token["content"]) for token in tokenizer.get("added_tokens", [])]
    return tokenizer.get("model"), tokenizer.get("pre_tokenizer"), tokenizer.get("normalizer"), sorted(added)
