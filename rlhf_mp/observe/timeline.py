"""What every process did when, for https://ui.perfetto.dev or chrome://tracing: ``timeline.json`` in the run directory.

  python -m rlhf_mp.observe.timeline RUN_DIR

puts it together from the parts of a run that did not come to its end. Every process writes a part of its own, as the
trace event format has it, by the clock of its machine; a part that was cut off has all events up to then.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from rlhf_mp.config.schema import RunConfig

PARTS, WHOLE = "timeline", "timeline.json"
MICROSECOND = 1e-6


class Timeline:
    """Of one process. Without a file nothing is written."""

    def __init__(self, file: Path | None = None, process: str = "", number: int = 0):
        """
        Args:
            process: its name on the left of the picture.
            number: its place there, from the top.
        """
        self._out, self._pid, self._ids = None, number, count()
        if file is None:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        self._out = file.open("a", buffering=1, encoding="utf-8")  # a resumed run goes on
        self._out.write("\n")  # after a line that was cut off
        self._write({"ph": "M", "name": "process_name", "args": {"name": process}})
        self._write({"ph": "M", "name": "process_sort_index", "args": {"sort_index": number}})

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Something that takes time; one inside another is drawn below it."""
        start = time.time()
        try:
            yield
        finally:
            self._write({"ph": "X", "name": name, "dur": (time.time() - start) / MICROSECOND}, start)

    @contextmanager
    def overlapping(self, name: str) -> Iterator[None]:
        """As ``span``, where others may begin meanwhile and end later: each is drawn on a line of its own."""
        event = {"cat": name, "name": name, "id": next(self._ids)}
        self._write(event | {"ph": "b"})
        try:
            yield
        finally:
            self._write(event | {"ph": "e"})

    def level(self, name: str, value: float) -> None:
        """A number from now on, drawn as a curve."""
        self._write({"ph": "C", "name": name, "args": {"value": value}})

    def _write(self, event: dict[str, Any], at: float | None = None) -> None:
        if self._out is not None:
            at = time.time() if at is None else at
            self._out.write(json.dumps(event | {"pid": self._pid, "tid": 0, "ts": at / MICROSECOND}) + "\n")


def make_timeline(config: RunConfig, run_dir: Path, process: str, number: int) -> Timeline:
    """Of a process of this run, if the run asks for it."""
    if not config.trainer.timeline:
        return Timeline()
    return Timeline(run_dir / PARTS / f"{process.replace(' ', '_')}.jsonl", process, number)


def put_together(run_dir: Path) -> Path | None:
    """One file of all parts; None where a run has none."""
    parts = sorted((run_dir / PARTS).glob("*.jsonl"))
    if not parts:
        return None
    events = [event for part in parts for event in _events(part)]
    whole = run_dir / WHOLE
    whole.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    return whole


def _events(part: Path) -> Iterator[dict[str, Any]]:
    for line in part.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # of a process that was killed
            continue


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    whole = put_together(Path(argv[0]))
    if whole is None:
        print(f"{argv[0]} has no {PARTS}/: the run was not started with trainer.timeline=true", file=sys.stderr)
        return 2
    print(whole)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
