"""Errors a user can act on: what is wrong, where, and what to do about it."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration or with a file it names."""

    key: str  # dotted path as typed on the command line, or a file with its line: "train.jsonl:17"
    found: object
    reason: str
    fix: str  # something to type or to do

    def __str__(self) -> str:
        return f"{self.key} = {self.found!r}: {self.reason}\n    fix: {self.fix}"


@dataclass(frozen=True)
class Absent(Problem):
    """A file or folder that is not on this machine: no start without it, but a check elsewhere can do without."""


class ConfigError(ValueError):
    """Every problem found, not only the first."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = list(problems)
        super().__init__(f"{len(self.problems)} problem(s)\n" + "\n".join(f"- {p}" for p in self.problems))


class EngineError(RuntimeError):
    """A rollout engine refused, died or did not answer."""

    def __init__(self, engine: str, reason: str, log_tail: str = ""):
        self.engine, self.reason, self.log_tail = engine, reason, log_tail
        tail = f"\nLast lines of its log:\n{log_tail}" if log_tail else ""
        super().__init__(f"{engine}: {reason}{tail}")

    def __reduce__(self):  # Ray pickles errors; the default would pass the message as ``engine``
        return type(self), (self.engine, self.reason, self.log_tail)


class EngineLost(EngineError):
    """A rollout engine that does not answer: it died, hangs, is too slow or broke inside. Another may take its work."""


class RewardError(RuntimeError):
    """A reward cannot be had: its service is not there, or it failed on too many responses."""


class SyncError(RuntimeError):
    """New weights did not arrive whole: which tensor, which version, which engine."""


class OutOfMemory(RuntimeError):
    """Memory ran out: in which phase, what held it, and what to turn."""


class SampleError(RuntimeError):
    """What was sampled cannot be trained on: a reward that is no number, or no group whose rewards differ."""


class DivergedError(RuntimeError):
    """Too many updates in a row had to be skipped: their loss or gradient is no finite number."""


class CheckpointError(RuntimeError):
    """A checkpoint is damaged or belongs to something else."""
