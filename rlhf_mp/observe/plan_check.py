"""Planned beside measured, from a run's metrics: for summary.json and for whoever reads the end of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

MEASURED, PLANNED, EXPECTED = "memory/", "plan/", "plan_seen/"
"""Prefixes of one and the same name: as it was, for the longest sequences, for those of the largest micro-batch."""


def compare(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for everything that was both planned and measured, of the last step that has them.

    Returns:
        GiB planned at most, GiB planned for the largest micro-batch that came, GiB measured, and how much the
        second of these is above the third.
    """
    latest = next((record for record in reversed(records) if any(name.startswith(PLANNED) for name in record)), {})
    rows = []
    for name in latest:
        what = name.removeprefix(PLANNED)
        measured = latest.get(MEASURED + what)
        if what == name or not measured:
            continue
        expected = latest.get(EXPECTED + what, latest[name])
        rows.append(
            {
                "what": what.removesuffix("_gib").replace("_", " "),
                "planned_gib": latest[name],
                "planned_for_largest_batch_gib": expected,
                "measured_gib": measured,
                "difference": expected / measured - 1,
            }
        )
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """In MiB where everything is small."""
    unit, scale = ("GiB", 1) if any(row["measured_gib"] > 8 for row in rows) else ("MiB", 1024)
    lines = [f"{'memory of rank 0, ' + unit:<34}{'planned':>10}{'for batch':>11}{'measured':>10}{'difference':>12}"]
    for row in rows:
        sizes = [row[key] * scale for key in ("planned_gib", "planned_for_largest_batch_gib", "measured_gib")]
        cells = f"{sizes[0]:>10.2f}{sizes[1]:>11.2f}{sizes[2]:>10.2f}{row['difference']:>+12.1%}"
        lines.append(f"  {row['what']:<32}{cells}")
    return "\n".join(lines)
