"""The benchmark suites.

  python -m benchmarks.run --suite tables --out benchmarks/results
  python -m benchmarks.run --suite all --out results

tables        every number the five source documents print, beside what their formulas give and what the planner says
memory        planned beside measured: the quickstart in every layout, and a ladder of models
throughput    the four headline rows: planned, and measured where their GPUs are
weight_sync   new weights into running servers, by transport, size, ranks, tensor parallelism, engines
rollout       one server's tokens a second by sequences at once

Each writes DIR/<suite>.json with machine, versions and commit, and DIR/<suite>.csv; report.html holds all of a call.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import memory, rollout, throughput, weight_sync
from benchmarks.record import provenance
from benchmarks.report import Table, page
from benchmarks.tables.page import body
from benchmarks.tables.suite import as_csv, as_markdown, as_records, compared, summary

PAGE = Path(__file__).parents[1] / "docs" / "tables.md"
MEASURED = ("memory", "throughput", "weight_sync", "rollout")


def run_tables(out: Path) -> str:
    """Writes its files and docs/tables.md; returns its part of the report."""
    results = list(compared())
    record = {"provenance": provenance(), "cells": as_records(results)}
    (out / "tables.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    (out / "tables.csv").write_text(as_csv(results))
    PAGE.write_text(as_markdown(results))
    print(summary(results))
    return body(results)


def run_measured(name: str, out: Path) -> str:
    """A suite by its own command; its JSON file is then read back into tables."""
    suites: dict[str, tuple[Callable[[list[str]], None], Callable[[dict[str, Any]], list[Table]]]] = {
        "memory": (memory.main, memory.tables),
        "throughput": (throughput.main, lambda results: [throughput.table(results["cells"])]),
        "weight_sync": (weight_sync.main, lambda results: [weight_sync.table(results["cells"])]),
        "rollout": (rollout.main, lambda results: [rollout.table(results["cells"])]),
    }
    main, tables_of = suites[name]
    main(["--json", str(out / f"{name}.json")])
    tables = tables_of(json.loads((out / f"{name}.json").read_text()))
    (out / f"{name}.csv").write_text("\n".join(table.csv() for table in tables))
    return "\n".join(table.html() for table in tables)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=("tables", *MEASURED, "all"), required=True)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    measured_on = provenance()
    chosen = ("tables", *MEASURED) if args.suite == "all" else (args.suite,)
    sections = [run_tables(args.out) if name == "tables" else run_measured(name, args.out) for name in chosen]
    name = "report" if args.suite == "all" else args.suite
    (args.out / f"{name}.html").write_text(page(f"Benchmarks: {', '.join(chosen)}", sections, measured_on))
    print(f"\n{args.out}/{name}.html")


if __name__ == "__main__":
    main(sys.argv[1:])
