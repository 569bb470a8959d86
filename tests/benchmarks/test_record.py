"""A place for results is looked at before anything is measured."""

import argparse
import json

import pytest

from benchmarks.record import add_results_option, write_results


def parsed(*words):
    parser = argparse.ArgumentParser()
    add_results_option(parser)
    return parser.parse_args(words).json


def test_results_are_written_where_they_were_asked_for(tmp_path):
    path = parsed("--json", str(tmp_path / "new" / "folder" / "found.json"))
    assert not path.exists()  # nothing is there that a command that continues would read
    write_results(path, {"a": [1, 2]})
    assert json.loads(path.read_text()) == {"a": [1, 2]}
    write_results(parsed(), {"a": 1})  # nowhere


def test_a_place_that_takes_no_file_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    for name in (tmp_path, tmp_path / "file" / "found.json", "/proc/found.json"):
        with pytest.raises(SystemExit):
            parsed("--json", str(name))
        assert "--json" in (said := capsys.readouterr().err) and "no file can be written" in said
