"""The parity table: differences are from torch in float32, and every engine has its row."""

import torch

from benchmarks.parity import compared, table


def run(layout: str, dtype: str, ranks: int, order: int, shift: float) -> dict:
    return {
        "layout": layout, "dtype": dtype, "ranks": ranks, "order": order,
        "losses": [1.0, 2.0 + shift], "grad_norms": [3.0 - 2 * shift, 4.0],
        "weights": {"w": torch.tensor([1.0, 5.0 + 4 * shift])},
    }  # fmt: skip


RUNS = [
    run("Megatron TP2", "float32", 2, 0, 0.25),
    run("torch", "bfloat16", 1, 0, 0.5),
    run("torch", "float32", 1, 0, 0.0),
]


def test_each_engine_is_compared_with_torch_in_float32():
    rows = compared(RUNS)
    assert [(row["layout"], row["dtype"]) for row in rows] == [
        ("torch", "float32"), ("Megatron TP2", "float32"), ("torch", "bfloat16"),
    ]  # fmt: skip
    differences = [[row[f"max_{what}_diff"] for what in ("loss", "grad_norm", "weight")] for row in rows]
    assert differences == [[0, 0, 0], [0.25, 0.5, 1.0], [0.5, 1.0, 2.0]]


def test_the_table_has_a_line_of_differences_and_one_of_updates_for_each_engine():
    lines = table(compared(RUNS)).splitlines()
    assert sum("Megatron TP2" in line for line in lines) == 2
    assert any("+1.0000/2.5000  +2.2500/4.0000" in line for line in lines)
