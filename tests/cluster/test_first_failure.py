"""The first failure of a job: who may say it, and what is told of it."""

import json

from rlhf_mp.cluster.first_failure import claim, failure_text, tail


def test_only_the_first_claim_counts(tmp_path):
    assert claim(tmp_path, "rank 1", 5, "died")
    assert not claim(tmp_path, "rank 0", 6, "died too")
    assert json.loads((tmp_path / "first_failure.json").read_text())["what"] == "rank 1"


def test_tail_reads_the_last_lines_only(tmp_path):
    (tmp_path / "log").write_text("".join(f"{n}\n" for n in range(100_000)))
    assert tail(tmp_path / "log", 2) == "99998\n99999"
    (tmp_path / "log").write_bytes(b"\xff")
    assert tail(tmp_path / "log", 2) == "\N{REPLACEMENT CHARACTER}"


def test_a_failure_before_the_log_was_begun_is_told_all_the_same(tmp_path):
    log = tmp_path / "engine_1_restart_3.log"
    told = failure_text("SGLang engine 1", "killed", log)
    assert told == f"\nSGLang engine 1: killed\nIt ended before it began its log {log}.\n"
    log.write_text("")
    assert "is empty" in failure_text("SGLang engine 1", "killed", log)
