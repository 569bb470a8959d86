"""docs/requirements.md can't rot: every requirement has a row, every path in it exists, the summary adds up."""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "requirements.md"
DOCUMENTS = {
    "000": range(1, 53),
    "001": range(53, 87),
    "002": range(87, 145),
    "003": range(145, 310),
    "004": range(310, 348),
}
TOPICS = (
    "planner and tables",
    "memory levers",
    "memory profiler",
    "LoRA and quantization",
    "PPO, critic and reward models",
    "more algorithms",
    "supervised fine-tuning",
    "Python interface",
    "judges and evaluators",
    "data mixing",
    "Megatron",
    "faults and recovery",
    "several nodes",
    "guides and examples",
)
STATUSES = ("met", "partial", "refused", *(f"planned: {topic}" for topic in TOPICS))
PATH = re.compile(
    r"`((?:rlhf_mp|launch|configs|benchmarks|examples|docs|tests)/[\w./-]*|[\w.-]+\.md|Makefile|setup\.py)`"
)


@dataclass(frozen=True)
class Row:
    document: str
    number: int
    requirement: str
    status: str
    where: str
    test: str


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def read_rows() -> list[Row]:
    rows, document = [], ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            document = line.removeprefix("## Document ").split(":")[0]
        elif re.match(r"\| R\d{3} \|", line):
            name, *rest = cells(line)
            rows.append(Row(document, int(name[1:]), *rest))
    return rows


def read_summary() -> dict[str, list[int]]:
    text = PAGE.read_text().split("## Summary")[1].split("\n## ")[0]
    table = [cells(line) for line in text.splitlines() if line.startswith("|")]
    assert table[0] == ["status", *DOCUMENTS, "all"]
    return {status: [int(count) for count in counts] for status, *counts in table[2:]}


ROWS = read_rows()


def test_every_requirement_has_one_row_in_the_table_of_its_document():
    expected = [(document, number) for document, numbers in DOCUMENTS.items() for number in numbers]
    assert [(row.document, row.number) for row in ROWS] == expected


def test_every_status_is_a_known_one():
    assert [(row.number, row.status) for row in ROWS if row.status not in STATUSES] == []


def test_every_path_exists():
    missing = {path for row in ROWS for path in PATH.findall(row.where + row.test) if not (ROOT / path).exists()}
    assert sorted(missing) == []


def test_what_is_met_names_its_place_and_its_test():
    met = [row for row in ROWS if row.status == "met"]
    assert [row.number for row in met if not PATH.search(row.where) or not row.test.startswith("`tests/")] == []


def test_what_is_partial_names_its_place_and_what_is_open():
    partial = [row for row in ROWS if row.status == "partial"]
    explained = [
        row for row in partial if PATH.search(row.where) and re.search(r"[a-z]{2}", re.sub("`.*?`", "", row.where))
    ]
    assert partial == explained


def test_what_is_refused_gives_its_reason():
    assert [row.number for row in ROWS if row.status == "refused" and len(row.where.split()) < 4] == []


def test_what_is_planned_claims_no_test():
    assert [row.number for row in ROWS if row.status.startswith("planned") and row.test != "-"] == []


def test_a_requirement_is_said_in_twelve_words():
    assert [row.requirement for row in ROWS if len(row.requirement.split()) > 12] == []


def test_the_summary_counts_the_rows():
    counts = Counter((row.status, row.document) for row in ROWS)
    expected = {}
    for status in {row.status for row in ROWS}:
        by_document = [counts[status, document] for document in DOCUMENTS]
        expected[status] = [*by_document, sum(by_document)]
    totals = [len(numbers) for numbers in DOCUMENTS.values()]
    expected["all"] = [*totals, sum(totals)]
    assert read_summary() == expected


def test_no_documented_command_breaks_at_a_backslash():
    """A backslash continues a line only as its last character: a comment or a blank after it ends the command."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in pages
        for block in re.findall(r"```(?:bash|sh|shell)\n(.*?)```", page.read_text(), re.DOTALL)
        for line in block.splitlines()
        if re.search(r"\\\s+(#.*)?$", line)
    ]
    assert broken == []
