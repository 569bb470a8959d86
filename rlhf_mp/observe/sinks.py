"""Where metrics and sampled texts go. Sinks exist on rank 0 only; the console has its own file."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from rlhf_mp.data.types import SampleText
from rlhf_mp.errors import ConfigError, Problem


class Sink(Protocol):
    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called once per ``MetricLog.finish``: a step and its validation may come as two calls."""
        ...

    def samples(self, step: int, texts: Sequence[SampleText]) -> None:
        """All that can be shown; ``logged`` are those for a log."""
        ...

    def close(self) -> None: ...


def logged(texts: Sequence[SampleText]) -> list[SampleText]:
    return [text for text in texts if text.in_log]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines. A last line without its newline was cut off by a kill: it is dropped."""
    with path.open() as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


class JsonlSink:
    """``metrics.jsonl`` and ``samples.jsonl``: one object a line, flushed at once. NaN is written as NaN.

    Args:
        first_step: the first step this process will write, 0 for a new run. Lines of an earlier process from
            there on are removed: the steps are about to be repeated.
    """

    def __init__(self, directory: Path, first_step: int):
        directory.mkdir(parents=True, exist_ok=True)
        self._metrics, self._samples = (
            _append_from(directory / name, first_step) for name in ("metrics.jsonl", "samples.jsonl")
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._metrics.write(json.dumps({"step": step, "wall_time": time.time(), **metrics}) + "\n")

    def samples(self, step: int, texts: Sequence[SampleText]) -> None:
        for text in logged(texts):
            shown = {name: getattr(text, name) for name in ("prompt", "response", "reward", "truth", "source")}
            self._samples.write(json.dumps({"step": step, **shown}) + "\n")

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()


def _append_from(path: Path, first_step: int) -> TextIO:
    """Open for appending after removing lines with ``step >= first_step``."""
    if path.exists():
        kept = [record for record in read_jsonl(path) if record["step"] < first_step]
        shorter = path.with_suffix(".tmp")
        shorter.write_text("".join(json.dumps(record) + "\n" for record in kept))
        os.replace(shorter, path)
    return path.open("a", buffering=1)  # line buffered: a killed run keeps every finished step


class TensorBoardSink:
    """Scalars, and sampled texts as Markdown.

    Args:
        first_step: as for JsonlSink. TensorBoard hides what earlier files of the folder have from there on.
    """

    def __init__(self, directory: Path, first_step: int):
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        self._writer = SummaryWriter(str(directory), purge_step=first_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def samples(self, step: int, texts: Sequence[SampleText]) -> None:
        for source in dict.fromkeys(text.source for text in logged(texts)):  # a step and its validation have one number
            of_source = (_markdown(text) for text in logged(texts) if text.source == source)
            self._writer.add_text(f"samples/{source}", "\n\n---\n\n".join(of_source), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _markdown(text: SampleText) -> str:
    def block(title: str, content: str) -> str:
        # indented, not fenced: a response may contain fences
        return f"**{title}**\n\n" + "\n".join(f"    {line}" for line in content.splitlines())

    return "\n\n".join(
        [
            f"**reward {text.reward:g}**",
            block("prompt", text.prompt),
            block("response", text.response),
            block("truth", text.truth),
        ]
    )


class WandbSink:
    """Weights & Biases. A resumed run is a new one there, in the group named after the experiment.

    Raises:
        ConfigError: the package is not installed.
    """

    def __init__(self, project: str, experiment: str, config: Mapping[str, Any], directory: Path):
        try:
            import wandb
        except ImportError as error:
            problem = Problem("trainer.logger", "wandb", "the package is not installed", "pip install wandb")
            raise ConfigError([problem]) from error
        self._wandb = wandb
        self._run = wandb.init(
            project=project, group=experiment, name=experiment, config=dict(config), dir=str(directory)
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, texts: Sequence[SampleText]) -> None:
        rows = [[text.prompt, text.response, text.reward, text.truth] for text in logged(texts)]
        table = self._wandb.Table(columns=["prompt", "response", "reward", "truth"], data=rows)
        self._run.log({"samples": table}, step=step)

    def close(self) -> None:
        self._run.finish()
