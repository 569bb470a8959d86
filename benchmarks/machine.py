"""Where a benchmark's numbers were measured: goes into every results file."""

import os
from datetime import UTC, datetime
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
