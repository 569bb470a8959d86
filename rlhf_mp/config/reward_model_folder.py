"""Is a folder a reward model that fits the policy? Reads small JSON files only."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_mp.config.schema import RunConfig
from rlhf_mp.errors import Absent, Problem

KEY = "reward_model.model.path"
TRAIN = "train one: trainer.task=reward_model; its run directory holds it as huggingface/"
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
    if policy.is_dir() and (differs := _different_vocabulary(folder, policy)):
        yield Problem(
            KEY,
            own.model.path,
            f"its {differs} is not that of the policy {policy}: token ids would mean other texts to it",
            "a reward model trained from a model of the policy's family, with the same tokenizer",
        )


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
