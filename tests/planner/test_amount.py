"""A number and its explanation are one thing: the printed arithmetic gives the printed bytes."""

import pytest

from rlhf_mp.planner.amount import GB, GIB, amount, gib, larger, parse_size, smaller


def test_gb_and_gib_are_told_apart():
    assert parse_size("24GB") == 24_000_000_000 == 24 * GB
    assert parse_size("24 GiB") == 25_769_803_776 == 24 * GIB
    assert parse_size("0.5gib") == 2**29


@pytest.mark.parametrize("text", ["24", "GB", "24 TB", "-1GB", "0GB", "24GB!", ""])
def test_a_size_without_a_unit_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="24GiB"):
        parse_size(text)


def test_a_formula_is_written_as_it_is_calculated():
    share = amount(2, "bytes").times(8_030_261_248, "parameters").over(8, "ranks")
    assert share.value == 2 * 8_030_261_248 / 8
    assert share.formula == "2 bytes x 8,030,261,248 parameters / 8 ranks"


def test_sums_are_bracketed_before_they_are_multiplied():
    both = (amount(3, "rows") + amount(4, "rows")).times(2, "bytes")
    assert (both.value, both.formula) == (14, "(3 rows + 4 rows) x 2 bytes")


def test_dividing_by_one_and_adding_nothing_leave_no_trace():
    one = amount(5, "bytes")
    assert one.over(1, "ranks") == one
    assert one + amount(0, "bytes") == one == amount(0, "bytes") + one


def test_comparisons_keep_the_explanation_of_the_winner():
    few, many = amount(1, "few"), amount(2, "many")
    assert larger(few, many) is many and smaller(few, many) is few


def test_sizes_are_printed_in_binary_units_and_say_so():
    assert gib(1.5 * GIB) == "1.50 GiB"
