"""Results as tables: in a terminal, as CSV, and all of them in one self-contained HTML file with charts."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

STYLE = """
body { font: 14px sans-serif; margin: 2em; max-width: 1300px }
table { border-collapse: collapse; margin: 1em 0 } td, th { border: 1px solid #ddd; padding: 2px 6px }
th { text-align: left; background: #f4f4f4 } td.number { text-align: right } caption { text-align: left }
.wrong { background: #fde0dd } .rounding { background: #fff7dc } svg text { font: 11px sans-serif }
"""
COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759")
BAR, WIDTH, LABELS = 14, 560, 330


@dataclass(frozen=True)
class Table:
    """One result. None is an empty cell: not measured, or not asked for."""

    title: str
    columns: list[str]
    rows: list[list[Any]]
    note: str = ""
    label: str = ""  # the last of the columns that name a bar
    chart: str = ""  # the column that is drawn; "": none

    def terminal(self) -> str:
        texts = [self.columns, *([shown(value) for value in row] for row in self.rows)]
        widths = [max(len(row[i]) for row in texts) for i in range(len(self.columns))]
        return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in texts)

    def csv(self) -> str:
        stream = io.StringIO()
        writer = csv.writer(stream)
        writer.writerows([self.columns, *(["" if v is None else v for v in row] for row in self.rows)])
        return stream.getvalue()

    def html(self) -> str:
        head = "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in self.rows)
        chart = self._chart() if self.chart and self.rows else ""
        note = f"<p>{escape(self.note)}</p>"
        return f"<h2>{escape(self.title)}</h2>{note}{chart}<table><tr>{head}</tr>\n{body}</table>"

    def _chart(self) -> str:
        """A bar for every row that has the number."""
        value, last = self.columns.index(self.chart), self.columns.index(self.label)
        bars = [(row[: last + 1], row[value]) for row in self.rows if row[value] is not None]
        if not bars:
            return ""
        largest = max(number for _, number in bars) or 1
        kinds = list(dict.fromkeys(names[-1] for names, _ in bars))
        parts = []
        for line, (names, number) in enumerate(bars):
            y, length = line * (BAR + 4), WIDTH * number / largest
            text = ", ".join(f"{c} {shown(n)}" for c, n in zip(self.columns, names, strict=False))
            color = COLORS[kinds.index(names[-1]) % len(COLORS)]
            parts.append(f"<text x='{LABELS - 6}' y='{y + 11}' text-anchor='end'>{escape(text)}</text>")
            parts.append(f"<rect x='{LABELS}' y='{y}' width='{length:.1f}' height='{BAR}' fill='{color}'/>")
            parts.append(f"<text x='{LABELS + length + 5:.1f}' y='{y + 11}'>{shown(number)}</text>")
        height = len(bars) * (BAR + 4)
        size = f"width='{LABELS + WIDTH + 90}' height='{height}'"
        return f"<p>{escape(self.chart)}</p><svg {size}>{''.join(parts)}</svg>"


def shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def _cell(value: Any) -> str:
    kind = " class='number'" if isinstance(value, int | float) else ""
    return f"<td{kind}>{escape(shown(value))}</td>"


def page(title: str, sections: Sequence[str], provenance: dict[str, Any]) -> str:
    """One file, nothing fetched."""
    head = f"<!doctype html><meta charset='utf-8'><title>{escape(title)}</title><style>{STYLE}</style>"
    machine = f"<h2>Provenance</h2><pre>{escape(json.dumps(provenance, indent=1))}</pre>"
    return "\n".join([head, f"<h1>{escape(title)}</h1>", *sections, machine]) + "\n"
