"""A results file: where its numbers were measured, and a place for it that is looked at before anything is."""

import argparse
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlhf_mp.observe.machine import git_commit, machine, versions


def provenance() -> dict[str, Any]:
    """Machine, package versions, commit, time, and how busy the machine was before the benchmark began."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "load_average_before": os.getloadavg()[0],
        "versions": versions(),
        "git_commit": git_commit(),
    }


def add_results_option(parser: argparse.ArgumentParser, remark: str = "") -> None:
    """``--json FILE``, refused where no file can be written: some of these commands take an hour."""
    parser.add_argument("--json", type=results_file, metavar="FILE", help=f"where the results go{remark}")


def results_file(name: str) -> Path:
    """Makes its folder, too.

    Raises:
        argparse.ArgumentTypeError: nothing can be written there.
    """
    path = Path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.touch()
            path.unlink()
        elif path.is_dir() or not os.access(path, os.W_OK):
            raise PermissionError
    except OSError as error:
        raise argparse.ArgumentTypeError(f"no file can be written at {path}") from error
    return path


def write_results(path: Path | None, results: dict[str, Any]) -> None:
    """Nothing where no file was asked for."""
    if path:
        path.write_text(json.dumps(results, indent=1) + "\n")
