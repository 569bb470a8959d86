"""The benchmark suites.

  python -m benchmarks.run --suite tables --out benchmarks/results

tables: every number the five source documents print, beside what their formulas give and what the planner says.
"""

import argparse
import json
from pathlib import Path

from benchmarks.machine import provenance
from benchmarks.tables.page import as_html
from benchmarks.tables.suite import as_csv, as_markdown, as_records, compared, summary

PAGE = Path(__file__).parents[1] / "docs" / "tables.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=("tables",), required=True)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where tables.json, .csv and .html go")
    args = parser.parse_args()
    results = list(compared())
    args.out.mkdir(parents=True, exist_ok=True)
    record = {"provenance": provenance(), "cells": as_records(results)}
    (args.out / "tables.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    (args.out / "tables.csv").write_text(as_csv(results))
    (args.out / "tables.html").write_text(as_html(results, record["provenance"]))
    PAGE.write_text(as_markdown(results))
    print(summary(results))
    print(f"\n{args.out}/tables.json, tables.csv and tables.html; {PAGE}")


if __name__ == "__main__":
    main()
