"""Tables in every form, and the arithmetic of the suites that measure; the measuring itself is a command of theirs."""

import csv
import io
import json
import re
from pathlib import Path

import pytest

from benchmarks import memory, rollout, throughput, weight_sync
from benchmarks.report import Table, page
from rlhf_mp.config.load import load_config
from rlhf_mp.models.tiny import TinyShape

TABLE = Table(
    "Speed <of things>",
    ["size", "kind", "GB/s", "why not"],
    [[50, "tensor", 2.5, None], [50, "disk", 0.5, None], [2000, "disk", None, "too <large>"]],
    "A note.",
    label="kind",
    chart="GB/s",
)


def test_all_forms_hold_the_same_rows():
    rows = list(csv.reader(io.StringIO(TABLE.csv())))
    assert rows[1] == ["50", "tensor", "2.5", ""] and len(rows) == 4
    assert len(TABLE.terminal().splitlines()) == 4
    assert TABLE.html().count("<tr>") == 4


def test_bars_are_as_long_as_their_numbers_and_only_what_was_measured_has_one():
    widths = [float(w) for w in re.findall(r"<rect [^>]*width='([\d.]+)'", TABLE.html())]
    assert len(widths) == 2
    assert widths[0] / widths[1] == pytest.approx(5, rel=1e-2)


def test_a_page_fetches_nothing_and_escapes_what_it_shows():
    html = page("Benchmarks", [TABLE.html()], {"git_commit": "abc<1>"})
    assert "http" not in html and "<script" not in html
    assert "Speed &lt;of things&gt;" in html and "too &lt;large&gt;" in html and "abc&lt;1&gt;" in html


def test_the_line_through_the_ladder_finds_what_the_plan_leaves_out():
    # measured = 100 + 1.2 x planned
    records = [{"planned_bytes": p, "measured_bytes": 100 + 1.2 * p} for p in (1000, 2000, 4000)]
    fit = memory.fitted([*records, {"planned_bytes": 9e9, "not_run": "too large"}], "measured_bytes")
    assert (fit["factor"], fit["constant_bytes"]) == (pytest.approx(1.2), pytest.approx(100))
    assert fit["largest_residual"] < 1e-9
    assert fit["largest_miss_of_the_plan"] == pytest.approx(1 - 1000 / 1300)
    assert memory.fitted(records[:2], "measured_bytes") is None  # a line through two points says nothing


def test_memory_tables_show_what_was_not_run():
    results = {
        "quickstart": [["torch", "actor weights", 3.0, 3.0, 3.0, 0.0]],
        "ladder": [
            {"num_params": 9e6, "device": "cpu", "planned_bytes": 2**21}
            | {"measured_bytes": 2**20, "process_bytes": 2**30},
            {"num_params": 3e9, "device": "cpu", "planned_bytes": 2**36, "not_run": "planned 64 GiB"},
        ],
        "fits": {"measured_bytes": None},
    }  # fmt: skip
    runs, ladder = memory.tables(results)
    assert len(runs.rows) == 1
    assert ladder.rows[0][2:6] == [2.0, 1.0, 1024.0, 1.0]
    assert ladder.rows[1][3:] == [None, None, None, "planned 64 GiB"]


@pytest.mark.parametrize("row", throughput.ROWS, ids=lambda row: row.size)
def test_every_headline_row_is_a_config_of_so_many_gpus(row):
    config = load_config(throughput.CONFIGS / f"{row.config}.yaml", [])
    assert config.trainer.num_ranks == row.num_gpus
    plan = throughput.planned(row)
    assert plan["fits"] and plan["tokens_per_s"] > 0


def test_where_the_gpus_are_missing_nothing_is_run_and_it_says_so():
    assert throughput.measured(throughput.ROWS[-1], None, 3)["not_run"].startswith("needs 32 GPUs")


def test_a_finished_run_fills_its_row(tmp_path):
    summary = {
        "phases": {"step": {"mean_s": 20.0, "tokens_per_s": 1234.0}},
        "memory": [{"what": "train peak", "measured_gib": 60.0}, {"what": "rss peak", "measured_gib": 300.0}],
        "machine": {"cpu": "x"},
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    size, folder = throughput.named_run(f"32B={tmp_path}")
    found = throughput.measured(throughput.ROWS[2], folder, 3)
    assert (size, found["tokens_per_s"], found["peak_gib"]) == ("32B", 1234.0, 60.0)
    with pytest.raises(Exception, match="3B, 8B, 32B, 70B"):
        throughput.named_run(f"9B={tmp_path}")


def num_params(shape: TinyShape) -> int:
    """By hand: queries, keys, values, output, three matrices of 3 x hidden; norms and embedding left out."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return shape.layers * (2 * shape.hidden * q + 2 * shape.hidden * kv + 9 * shape.hidden**2)


@pytest.mark.parametrize("mb", [50, 500, 2000])
def test_weights_are_about_as_large_as_asked(mb):
    assert 4e-6 * num_params(weight_sync.shape_of(mb)) == pytest.approx(mb, rel=0.25)


def test_rates_count_the_bytes_of_every_engine_against_a_copy():
    values = {"seconds": 2.0, "gb_per_s": 1.0, "bytes": 2e9}
    result = {"transports": {"tensor": values}, "copy_gb_per_s": 4.0, "per_parameter_s": 12.0}
    (record,) = weight_sync.flattened({"mb": 2000, "ranks": 1, "tensor_parallel": 1, "engines": 2}, result)
    assert record["of_copy"] == 0.5  # 2 GB into each of two engines in 2 s
    assert record["times_faster"] == 6.0
    assert weight_sync.table([record]).rows[0][4:6] == ["tensor", 2.0]


def test_the_rollout_table_has_a_column_for_every_number():
    record = {"sequences": 8, "tokens": 64, "seconds": 2.0, "tokens_per_s": 256.0, "ms_per_token": 31.25}
    table = rollout.table([record])
    assert len(table.columns) == len(table.rows[0])


def test_published_results_name_machine_versions_and_commit():
    for path in sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json")):
        record = json.loads(path.read_text())
        provenance = record.get("provenance", record)
        assert {"machine", "versions", "git_commit"} <= provenance.keys(), path.name
