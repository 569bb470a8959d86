"""All cells side by side, as terminal table, JSON, CSV and the page docs/tables.md."""

import csv
import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.tables import document_000, document_002, document_003, document_004
from benchmarks.tables.cells import Cell, Compared, printed_cells

DOCUMENTS = {
    "000": document_000,
    "001": document_003,
    "002": document_002,
    "003": document_003,
    "004": document_004,
}
UNMEASURED = "not measured on this machine"
HEADER = ("table", "line", "row", "column", "printed", "recomputed", "difference", "planned", "measured", "verdict")


def compared() -> Iterator[Compared]:
    for cell in printed_cells():
        module = DOCUMENTS[cell.document]
        result = Compared(cell, module.recomputed(cell), module.planned(cell), document_002.floor(cell))
        yield replace(result, note=explain_wrong(result), measured=document_003.measured(cell))


def explain_wrong(result: Compared) -> str:
    """One line for a cell that contradicts its own document."""
    cell = result.cell
    if result.verdict != "wrong":
        return ""
    if result.recomputed is None:
        return f"the bfloat16 weights alone are {result.floor:g} GB"
    if cell.is_capacity:
        return f"{cell.value} GB for what the same document says needs {result.recomputed} GB"
    if cell.column == "FP16 TFLOPs":
        return f"the rate without tensor cores; training runs at up to {result.recomputed}"
    if cell.table.startswith("004-gpus"):
        return f"the maker sells {result.recomputed} GB"
    if cell.column == "hidden size":
        return f"its formula sqrt(P / 12 L) gives {result.recomputed}"
    if cell.document == "000" and ("otal" in cell.column or cell.table == "000-summary"):
        return f"its formulas give {result.recomputed}; it inherits the errors of its KV cache and activations"
    if cell.document == "004":
        return f"its own parts add up to {result.recomputed}"
    return f"its own formula and inputs give {result.recomputed}"


def summary(results: list[Compared]) -> str:
    """Cells by document and verdict."""
    counts = Counter((r.cell.document, r.verdict) for r in results)
    verdicts = ("consistent", "rounding", "wrong", "assumption missing")
    lines = [f"{'document':<10}" + "".join(f"{v:>20}" for v in verdicts) + f"{'cells':>8}{'planned':>9}"]
    for document in DOCUMENTS:
        own = [r for r in results if r.cell.document == document]
        planned = sum(r.planned is not None for r in own)
        row = "".join(f"{counts[document, v]:>20}" for v in verdicts)
        lines.append(f"{document:<10}{row}{len(own):>8}{planned:>9}")
    row = "".join(f"{sum(counts[d, v] for d in DOCUMENTS):>20}" for v in verdicts)
    lines.append(f"{'all':<10}{row}{len(results):>8}{sum(r.planned is not None for r in results):>9}")
    return "\n".join(lines)


def row_of(result: Compared) -> list[str]:
    cell = result.cell
    difference = "" if result.difference is None else f"{result.difference:+.1%}"
    own = "" if result.recomputed is None else str(result.recomputed)
    planned = "" if result.planned is None else str(result.planned.value)
    return [
        cell.table,
        str(cell.line),
        cell.row,
        cell.column,
        cell.printed,
        own,
        difference,
        planned,
        "" if result.measured is None else str(result.measured),
        result.verdict,
    ]


def as_csv(results: list[Compared]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream)
    writer.writerow([*HEADER, "unit", "planned basis", "note"])
    for result in results:
        basis = result.planned.basis if result.planned else ""
        writer.writerow([*row_of(result), result.cell.unit, basis, result.note])
    return stream.getvalue()


def as_records(results: list[Compared]) -> list[dict[str, Any]]:
    return [
        {
            **_printed(result.cell),
            "recomputed": result.recomputed and [result.recomputed.low, result.recomputed.high],
            "difference": result.difference,
            "planned": result.planned and [result.planned.value.low, result.planned.value.high],
            "planned_basis": result.planned and result.planned.basis,
            "measured": result.measured and [result.measured.low, result.measured.high],
            "measured_note": "" if result.measured else UNMEASURED,
            "verdict": result.verdict,
            "note": result.note,
        }
        for result in results
    ]


def _printed(cell: Cell) -> dict[str, Any]:
    return {
        "table": cell.table,
        "line": cell.line,
        "row": cell.row,
        "column": cell.column,
        "unit": cell.unit,
        "printed": cell.printed,
        "printed_range": [cell.value.low, cell.value.high],
    }


def as_markdown(results: list[Compared]) -> str:
    """docs/tables.md: every cell, wrong ones in bold and explained."""
    lines = [
        "# The tables of the source documents, recomputed",
        "",
        "Made by `python -m benchmarks.run --suite tables --out benchmarks/results`; do not edit.",
        "",
        "*Printed* is what the document says, *recomputed* what its own formula and inputs give, *planned* what",
        "`rlhf_mp/planner` says for the real model of that size: Qwen2.5-3B, Llama-3.1-8B, Qwen2.5-32B, Llama-3.1-70B,",
        "and in document 002 the models it names. Sizes are GB of 10^9 bytes. Where a card is printed, *recomputed* is",
        "what has to fit it. Empty *recomputed*: the document does not say enough. *Measured* is",
        "empty where nothing was: everything here asks for GPUs that the machine of these results does not have.",
        "",
        "```text",
        summary(results),
        "```",
    ]
    table = None
    for result in results:
        cell = result.cell
        if cell.table != table:
            table = cell.table
            lines += ["", f"## {cell.table}: {cell.title}", ""]
            lines += [
                "| line | row | column | printed | recomputed | difference | planned | measured | verdict |",
                "|" + "---|" * 9,
            ]
        _, line, *fields = (field.replace("|", "/").replace("*", "") for field in row_of(result))
        shown = [line, *fields[:7]]
        verdict = f"**wrong**: {result.note}" if result.note else result.verdict
        lines.append("| " + " | ".join([*shown, verdict]) + " |")
    return "\n".join(lines) + "\n"
