"""The comparison as a part of an HTML report: charts of the headline totals, then every cell."""

from html import escape
from itertools import groupby

from benchmarks.tables.cells import Compared
from benchmarks.tables.suite import HEADER, row_of, summary

COLORS = {"printed": "#bab0ac", "recomputed": "#4e79a7", "planned": "#f28e2b"}
CHARTED = ("000-summary", "003-breakdown")
WIDTH, BAR = 620, 9


def body(results: list[Compared]) -> str:
    parts = ["<h2>The tables of the source documents: printed, recomputed, planned</h2>"]
    parts.append("<p>Sizes in GB of 10^9 bytes. Measured where this machine can; empty where not.</p>")
    parts.append(f"<pre>{escape(summary(results))}</pre>")
    for table, cells in groupby(results, key=lambda result: result.cell.table):
        own = list(cells)
        parts.append(f"<h3>{escape(table)}: {escape(own[0].cell.title)}</h3>")
        if table in CHARTED:
            parts.append(chart(own))
        parts.append(rows(own))
    return "\n".join(parts)


def rows(results: list[Compared]) -> str:
    head = "".join(f"<th>{name}</th>" for name in (*HEADER[1:], "note"))
    body = "".join(
        f"<tr class='{result.verdict.split()[0]}'>"
        + "".join(f"<td>{escape(text)}</td>" for text in (*row_of(result)[1:], result.note))
        + "</tr>\n"
        for result in results
    )
    return f"<table><tr>{head}</tr>\n{body}</table>"


def chart(results: list[Compared]) -> str:
    """Three bars a cell on one scale of roots: the numbers differ by two orders of magnitude."""
    shown = [(r, bar_values(r)) for r in results]
    largest = max(value for _, values in shown for value in values.values())
    boxes, y = [], 10.0
    for result, values in shown:
        boxes.append(f"<text x='0' y='{y + 18}'>{escape(f'{result.cell.row} {result.cell.column}')}</text>")
        for name, value in values.items():
            length = WIDTH * (value / largest) ** 0.5
            boxes.append(f"<rect x='240' y='{y:.0f}' width='{length:.1f}' height='{BAR}' fill='{COLORS[name]}'/>")
            boxes.append(f"<text x='{245 + length:.1f}' y='{y + BAR:.0f}' font-size='9'>{name} {value:,.4g}</text>")
            y += BAR + 1
        y += 8
    return f"<p>Lengths are square roots.</p><svg width='{WIDTH + 400}' height='{y:.0f}'>{''.join(boxes)}</svg>"


def bar_values(result: Compared) -> dict[str, float]:
    values = {"printed": result.cell.value.high}
    if result.recomputed is not None:
        values["recomputed"] = result.recomputed.high
    if result.planned is not None:
        values["planned"] = result.planned.value.high
    return values
