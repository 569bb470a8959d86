"""Rules about data, validation and the checkpoint it chooses: one ``if`` and one ``yield`` each."""

from collections.abc import Iterator

from rlhf_mp.config.schema import RunConfig
from rlhf_mp.errors import Problem


def written_problems(config: RunConfig) -> Iterator[Problem]:
    """Knobs without effect in what somebody wrote."""
    data, trainer = config.data, config.trainer
    if data.truncation != "error" and data.filter_overlong_prompts:
        yield Problem(
            "data.truncation",
            data.truncation,
            "nothing is left to cut: data.filter_overlong_prompts=true drops too long prompts",
            "data.filter_overlong_prompts=false, or remove it",
        )
    if data.curriculum_order != "ascending" and data.curriculum_key is None:
        yield Problem(
            "data.curriculum_order",
            data.curriculum_order,
            "no effect without data.curriculum_key",
            "data.curriculum_key=<column>, or remove it",
        )
    if trainer.best_metric is None:
        for key, unset in {"best_mode": "max", "stop_at": None}.items():
            if (value := getattr(trainer, key)) != unset:
                fix = "trainer.best_metric=eval/<metric>, or remove it"
                yield Problem(f"trainer.{key}", value, "no effect without trainer.best_metric", fix)
    elif trainer.stop_at is not None and trainer.test_freq < 1:
        reason = "no effect where nothing is validated before the last step (trainer.test_freq)"
        yield Problem("trainer.stop_at", trainer.stop_at, reason, "trainer.test_freq=10, or remove it")


def data_problems(config: RunConfig) -> Iterator[Problem]:
    """Rules that need two knobs."""
    data, trainer = config.data, config.trainer
    if data.train_weights and len(data.train_weights) != len(data.train_files):
        yield Problem(
            "data.train_weights",
            data.train_weights,
            f"{len(data.train_weights)} weight(s) for the {len(data.train_files)} entries of data.train_files",
            f"data.train_weights=[{','.join(['1'] * len(data.train_files))}], or remove it",
        )
    if trainer.best_metric is not None and not trainer.best_metric.startswith("eval/"):
        yield Problem(
            "trainer.best_metric",
            trainer.best_metric,
            "validation decides which checkpoint is best, and its metrics start with eval/",
            "trainer.best_metric=eval/accuracy",
        )
    if trainer.best_metric is not None and not data.val_files:
        yield Problem(
            "trainer.best_metric",
            trainer.best_metric,
            "there is nothing to validate on: data.val_files is empty",
            "data.val_files=<file>, or remove it",
        )
