"""The documents' numbers: vendored whole, recomputed right, judged by one rule."""

import csv
import io
import json
import re
from pathlib import Path

import pytest

from benchmarks.report import page
from benchmarks.tables.cells import Cell, Compared, Range, exactly, printed_digit
from benchmarks.tables.page import body
from benchmarks.tables.suite import as_csv, as_markdown, as_records, compared, summary

ROOT = Path(__file__).parents[2]
AUDIT = ROOT.parent / "shared" / "seeds" / "audit.json"


@pytest.fixture(scope="module")
def results():
    return list(compared())


def cell(printed, value, table="002-train", column="Full Fine-tune"):
    return Cell(table, "", 1, "", column, "GB", printed, exactly(value))


def test_all_printed_numbers_are_there(results):
    assert len(results) == 323
    assert {r.cell.document for r in results} == {"000", "001", "002", "003", "004"}


@pytest.mark.parametrize(("column", "by_hand"), [
    ("activations", 32 * 2048 * 2560 * 32 * 2 / 1e9),  # 10.74
    ("KV cache", 32 * 2048 * 32 * 2560 * 2 * 2 / 1e9),  # 21.47, printed as 16.8
    ("total without optimizations", 6 + 6 + 12 + 10.737418 + 21.474836 + 2),
    ("FSDP total per GPU", 24 / 8 + 10.737418 + 21.474836 + 2),
])  # fmt: skip
def test_document_000s_3b_column_by_hand(results, column, by_hand):
    (found,) = [r for r in results if r.cell.table == "000-analysis-3B" and r.cell.column == column]
    assert found.recomputed.low == pytest.approx(by_hand, rel=1e-6)


def test_the_verdict_follows_from_the_difference():
    assert Compared(cell("16 GB", 16.0), exactly(15.8), None).verdict == "consistent"  # 1.3%
    assert Compared(cell("4 GB", 4.0), exactly(4.36), None).verdict == "rounding"  # 4.36 is printed as 4
    assert Compared(cell("56 GB", 56.0), exactly(84.5), None).verdict == "wrong"
    assert Compared(cell("42.2 GB", 42.2), exactly(42.95), None).verdict == "wrong"  # 1.7% off, but not its digits
    assert Compared(cell("~110 GB", 110.0), exactly(104.0), None).verdict == "rounding"  # 5.8%, and it says "about"
    assert Compared(cell("56 GB", 56.0), None, None).verdict == "assumption missing"
    assert Compared(cell("80 GB", 80.0), None, None, floor=140.0).verdict == "wrong"
    card = cell("24 GB", 24.0, table="002-hw", column="Minimum GPU")
    assert Compared(card, exactly(16.0), None).verdict == "consistent"  # it fits
    assert Compared(card, exactly(36.0), None).verdict == "wrong"


@pytest.mark.parametrize(("text", "digit"), [("16 GB", 1), ("10.7 GB", 0.1), ("~85-90 GB", 1), ("15,000", 1)])
def test_the_last_printed_digit_is_found(text, digit):
    assert printed_digit(text) == pytest.approx(digit)


def test_wrong_cells_and_only_they_are_explained(results):
    assert all(bool(r.note) == (r.verdict == "wrong") for r in results)


def test_a_range_is_judged_by_the_bound_that_is_further_off():
    loose = Cell("004-batch", "", 1, "", "Total Memory", "GB", "~85-90 GB", Range(85, 90))
    assert Compared(loose, Range(85.25, 93.875), None).difference == pytest.approx(90 / 93.875 - 1)


def test_nothing_planned_is_absurd(results):
    for result in results:
        if result.planned is not None:
            assert 0 <= result.planned.value.low <= result.planned.value.high < 1e12
            assert result.planned.basis


def test_all_outputs_hold_the_same_cells(results):
    rows = list(csv.reader(io.StringIO(as_csv(results))))
    markdown = as_markdown(results)
    records = json.loads(json.dumps(as_records(results)))
    assert len(rows) - 1 == len(records) == len(results)
    assert len(re.findall(r"^\| \d+ \|", markdown, re.MULTILINE)) == len(results)
    assert summary(results) in markdown
    html = page("Benchmarks", [body(results)], {"commit": "abc"})
    assert html.count("<tr class=") == len(results)
    assert "http" not in html and "abc" in html  # one file, nothing fetched


def test_the_page_in_docs_is_up_to_date(results):
    assert (ROOT / "docs" / "tables.md").read_text() == as_markdown(results)


@pytest.mark.skipif(not AUDIT.is_file(), reason="the independent audit is not beside this checkout")
def test_an_independent_audit_recomputes_the_same_numbers(results):
    audited = {
        (c["table"], c["line"], str(c["row"]), c["col"], str(c["printed"])): c["recomputed"]
        for c in json.loads(AUDIT.read_text())["cells"]
    }
    num_compared = 0
    for result in results:
        own = result.cell
        other = audited[own.table, own.line, own.row, own.column, own.printed]
        if other is not None and result.recomputed is not None:
            # the audit rounds the ends of document 004's ranges to whole GB
            assert [result.recomputed.low, result.recomputed.high] == pytest.approx(other, rel=1e-3, abs=0.51), own
            num_compared += 1
    assert num_compared > 200
