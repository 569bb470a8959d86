"""A histogram as text, for a terminal of any width."""

from collections.abc import Sequence

import numpy as np

BLOCKS = " ▏▎▍▌▋▊▉█"


def histogram(values: Sequence[float], *, num_bins: int = 10, width: int = 40) -> list[str]:
    """One line a bin: its range, a bar, its count. Whole numbers get bins of whole numbers."""
    numbers = np.asarray(values)
    low, high = int(numbers.min()), int(numbers.max())
    step = max(1, -(-(high - low + 1) // num_bins))
    edges = np.arange(low, high + step + 1, step)
    counts, _ = np.histogram(numbers, edges)
    digits, most = len(str(edges[-1])), counts.max()
    return [
        f"{edges[i]:>{digits}} - {edges[i + 1] - 1:<{digits}} {bar(count / most, width)} {count}"
        for i, count in enumerate(counts)
        if edges[i] <= high
    ]


def bar(share: float, width: int) -> str:
    eighths = round(share * width * 8)
    return (BLOCKS[8] * (eighths // 8) + BLOCKS[eighths % 8]).ljust(width + 1)[: width + 1]


def quantiles(values: Sequence[float]) -> str:
    """min, median, 95 %, max in one line."""
    found = np.percentile(np.asarray(values), [0, 50, 95, 100])
    return "  ".join(f"{name} {value:.0f}" for name, value in zip(("min", "median", "95%", "max"), found, strict=True))
