"""A number of bytes that remembers how it came about, so that every figure of a plan can be explained."""

import re
from dataclasses import dataclass
from functools import lru_cache

GB = 1e9  # what documents and data sheets print
GIB = 2.0**30  # what nvidia-smi, torch and /proc/meminfo count in
MIB = 2.0**20

SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*(GB|GiB|MB|MiB)\s*", re.IGNORECASE)
SCALES = {"gb": GB, "gib": GIB, "mb": 1e6, "mib": MIB}


@dataclass(frozen=True)
class Amount:
    """Bytes and the arithmetic behind them; ``formula`` evaluates to ``value`` when its words are left out."""

    value: float
    formula: str

    def __add__(self, other: "Amount") -> "Amount":
        if not other.value:
            return self
        return Amount(self.value + other.value, f"{self.formula} + {other.formula}") if self.value else other

    def times(self, factor: float, what: str) -> "Amount":
        return Amount(self.value * factor, f"{_grouped(self.formula)} x {_number(factor)} {what}")

    def over(self, divisor: float, what: str) -> "Amount":
        """Divided by ``divisor``; by 1 it is not worth a word."""
        if divisor == 1:
            return self
        return Amount(self.value / divisor, f"{_grouped(self.formula)} / {_number(divisor)} {what}")


NOTHING = Amount(0.0, "0")


def amount(value: float, what: str) -> Amount:
    """One given number, e.g. ``amount(2, "bytes")``."""
    return Amount(value, f"{_number(value)} {what}")


def larger(first: Amount, second: Amount) -> Amount:
    return first if first.value >= second.value else second


def smaller(first: Amount, second: Amount) -> Amount:
    return first if first.value <= second.value else second


def _grouped(formula: str) -> str:
    return f"({formula})" if " + " in formula else formula


@lru_cache(4096)  # a search writes the same few numbers a hundred thousand times
def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else repr(float(value))


def parse_size(text: str) -> float:
    """Bytes of "24GB" (10^9) or "24GiB" (2^30).

    Raises:
        ValueError: not a positive number with a unit.
    """
    match = SIZE.fullmatch(text)
    if match is None or not float(match[1]):
        raise ValueError(f"{text!r} is no size; write it with its unit, e.g. 24GB (10^9 bytes) or 24GiB (2^30 bytes)")
    return float(match[1]) * SCALES[match[2].lower()]


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.2f} GiB"
