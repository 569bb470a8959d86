"""The benchmark of loading: its rows are like real ones, and each side loads the same prompts."""

import json
import random

import pytest

from benchmarks.data import SIDES, line, question, write_rows
from rlhf_mp.config.schema import DataConfig
from rlhf_mp.models.tiny import byte_pair_tokenizer


def test_the_answer_is_the_sum_of_what_is_told():
    row = question(random.Random(3))
    told = [int(word) for word in row["prompt"].split() if word.isdigit()]
    assert row["answer"] == f"#### {sum(told)}"


def test_every_side_gives_the_same_first_batch(tmp_path):
    write_rows(tmp_path / "rows.jsonl", 40)
    rows = [json.loads(text) for text in (tmp_path / "rows.jsonl").read_text().splitlines()]
    tokenizer = byte_pair_tokenizer((row["prompt"] for row in rows), 400)
    data = DataConfig(train_batch_size=8, cache_dir=str(tmp_path / "cache"), apply_chat_template=False)
    batches = [SIDES[side](str(tmp_path / "rows.jsonl"), tokenizer, data)() for side in ("table", "again", "list")]
    assert batches[0] == batches[1] == batches[2] and len(batches[0]) == 8


def test_a_result_is_a_line():
    found = {"side": "table", "rows": 1000, "file_mb": 1.0, "start_s": 2.0, "batch_s": 0.01}
    shown = line(found | {"rss_before_mib": 100.0, "rss_peak_mib": 150.0})
    assert " ".join(shown.split()) == "table 1,000 rows 1 MB start 2.00 s memory 50 MiB batch 10 ms"


@pytest.mark.parametrize("count", [0, 3])
def test_as_many_rows_are_written_as_asked(tmp_path, count):
    write_rows(tmp_path / "rows.jsonl", count)
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == count
