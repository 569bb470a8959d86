"""A printed number, what its own document's formula gives, and what the planner says."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGETS = Path(__file__).parents[1] / "targets"
CAPACITY_TABLES = ("000-hardware", "002-vram-guide", "002-hw", "002-model-guide", "003-bench")
"""These print the size of a card; the recomputed number is what has to fit."""


CONSISTENT, ABOUT = 0.02, 0.06
"""Largest relative difference of a cell that shows the right digits, and of one that says "~"."""


@dataclass(frozen=True)
class Range:
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:,.4g}" if self.low == self.high else f"{self.low:,.4g} to {self.high:,.4g}"


def exactly(value: float) -> Range:
    return Range(value, value)


@dataclass(frozen=True)
class Cell:
    """As printed. Sizes are decimal GB."""

    table: str
    title: str
    line: int  # of the document
    row: str
    column: str
    unit: str
    printed: str
    value: Range

    @property
    def document(self) -> str:
        return self.table[:3]

    @property
    def is_capacity(self) -> bool:
        return self.table in CAPACITY_TABLES and self.column not in ("Throughput (tokens/s)", "Training Time")


@dataclass(frozen=True)
class Answer:
    """A number and where it comes from, in a line."""

    value: Range
    basis: str


@dataclass(frozen=True)
class Compared:
    """One cell of the report."""

    cell: Cell
    recomputed: Range | None  # None: the document does not say enough
    planned: Answer | None
    floor: float | None = None  # what it cannot be less than: the weights alone
    note: str = ""  # why a wrong cell is wrong
    measured: Range | None = None

    @property
    def difference(self) -> float | None:
        """Of the printed from the recomputed number; of the bound that is further off."""
        if self.recomputed is None or self.cell.is_capacity:
            return None
        pairs = ((self.cell.value.low, self.recomputed.low), (self.cell.value.high, self.recomputed.high))
        return max((printed / own - 1 for printed, own in pairs), key=abs)

    @property
    def verdict(self) -> str:
        printed = self.cell.value
        if self.floor is not None and printed.high < self.floor:
            return "wrong"
        if self.recomputed is None:
            return "assumption missing"
        if self.cell.is_capacity:
            return "consistent" if self.recomputed.high <= printed.high else "wrong"
        digit = 1.0 if self.cell.unit == "%" else printed_digit(self.cell.printed)
        off = max(abs(printed.low - self.recomputed.low), abs(printed.high - self.recomputed.high))
        if off <= digit / 2 * 1.001 and abs(self.difference) <= CONSISTENT:
            return "consistent"
        about = "~" in self.cell.printed and abs(self.difference) <= ABOUT
        return "rounding" if off <= digit or about else "wrong"


def printed_digit(text: str) -> float:
    """One unit of the last printed digit: 1 for "16 GB", 0.1 for "10.7"."""
    number = re.search(r"\d[\d,]*(?:\.(\d+))?", text)
    return 10.0 ** -len(number[1]) if number and number[1] else 1.0


def printed_cells() -> Iterator[Cell]:
    for file in sorted(TARGETS.glob("document_*.json")):
        for table in json.loads(file.read_text())["tables"]:
            yield from (_cell(table, record) for record in table["cells"])


def _cell(table: dict[str, Any], record: dict[str, Any]) -> Cell:
    return Cell(
        table=table["id"],
        title=table["title"],
        line=record["line"],
        row=record["row"],
        column=record["column"],
        unit=record["unit"],
        printed=record["printed"],
        value=Range(record["low"], record["high"]),
    )
