"""A validation's metrics in the order people read them."""

from collections.abc import Mapping

FIRST, LAST = ("accuracy", "reward_mean"), ("response_length_mean",)


def by_file(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """What is named ``eval/<metric>`` under "", then ``eval/<file>/<metric>`` under each file's name."""
    table: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        if name.startswith("eval/"):
            file, _, metric = name.removeprefix("eval/").rpartition("/")
            table.setdefault(file, {})[metric] = value
    return {file: dict(sorted(table[file].items(), key=lambda item: place(item[0]))) for file in sorted(table)}


def place(metric: str) -> tuple[int, str, int]:
    """pass@2 before pass@16."""
    kind, _, count = metric.partition("@")
    group = FIRST.index(metric) if metric in FIRST else 9 if metric in LAST else len(FIRST)
    return group, kind, int(count) if count.isdigit() else 0
