"""The checksum against Python's integers and against corruption; the comparison against every kind of difference."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from rlhf_mp.weights import manifest
from rlhf_mp.weights.manifest import Manifest, TensorRecord, checksum, differences

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int64, torch.int8,
    torch.uint8, torch.bool,
]  # fmt: skip


def naive(data: bytes) -> int:
    """Words of 8 bytes, zeros behind, each times its own odd number, modulo 2^64."""
    data += bytes(-len(data) % 8)
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    return sum((2 * i + 1) * word for i, word in enumerate(words)) % 2**64


def tensor_of(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


@given(st.binary(max_size=200))
def test_the_checksum_is_the_weighted_sum_of_words(data):
    assert checksum(tensor_of(data)) == naive(data)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 5), (2, 3, 4), (17,)], ids=str)
def test_every_type_and_shape_is_summed_over_its_bytes(dtype, shape):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul(50).to(dtype)
    stored = bytes(values.reshape(-1).view(torch.uint8).tolist())
    assert len(stored) == values.numel() * dtype.itemsize
    assert checksum(values) == naive(stored)


@given(st.data())
def test_any_flipped_bit_is_noticed(data):
    original = data.draw(st.binary(min_size=1, max_size=100))
    place = data.draw(st.integers(0, 8 * len(original) - 1))
    flipped = bytearray(original)
    flipped[place // 8] ^= 1 << place % 8
    assert checksum(tensor_of(original)) != checksum(tensor_of(bytes(flipped)))


@given(st.data())
def test_any_change_within_one_word_is_noticed(data):
    original = data.draw(st.binary(min_size=8, max_size=100))
    start = 8 * data.draw(st.integers(0, len(original) // 8 - 1))
    word = data.draw(st.binary(min_size=8, max_size=8))
    assume(word != original[start : start + 8])
    assert checksum(tensor_of(original)) != checksum(tensor_of(original[:start] + word + original[start + 8 :]))


@given(st.data())
def test_swapped_weights_are_noticed(data):
    values = torch.randn(
        24, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))), dtype=torch.float64
    )
    i, j = data.draw(st.lists(st.integers(0, 23), min_size=2, max_size=2, unique=True))
    swapped = values.clone()
    swapped[[i, j]] = values[[j, i]]
    assert checksum(values) != checksum(swapped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_up_rows_and_a_transposed_matrix_are_noticed(dtype):
    values = torch.randn(16, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    others = [values.flip(0), values.roll(1, 0), values.flip(1), values.T, torch.cat([values[8:], values[:8]])]
    assert len({checksum(x) for x in [values, *others]}) == 6


def test_the_same_values_have_one_checksum_however_they_lie_in_memory():
    values = torch.randn(6, 10, generator=torch.Generator().manual_seed(3))
    wide = torch.zeros(6, 21)
    wide[:, 1:11] = values
    assert checksum(wide[:, 1:11]) == checksum(values.T.contiguous().T) == checksum(values)
    part = torch.arange(9.0)[1:5]  # whole words, but not where words begin
    assert checksum(part) == checksum(part.clone())
    assert checksum(values.requires_grad_()) == checksum(values.detach())


@pytest.mark.parametrize("num_words", [manifest.COLUMNS, 3 * manifest.COLUMNS, 5 * manifest.COLUMNS + 7])
def test_a_large_tensor_is_summed_in_parts(monkeypatch, num_words):
    values = torch.randn(num_words, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    expected = naive(bytes(values.view(torch.uint8).tolist()))
    for rows in (1, 2, 5, 128):
        monkeypatch.setitem(manifest.ROWS, "cpu", rows)
        assert checksum(values) == expected


RECORDS = tuple(TensorRecord.of(f"layer.{i}", torch.full((2, 2), float(i + 1))) for i in range(3))
SENT = Manifest(7, RECORDS)
NAMES = [record.name for record in RECORDS]


def test_a_whole_version_has_no_differences_whatever_its_order():
    assert differences(SENT, RECORDS, NAMES) == []
    assert differences(SENT, RECORDS[::-1], NAMES[::-1]) == []


@pytest.mark.parametrize(
    ("arrived", "expected"),
    [
        (RECORDS[:2], ["layer.2 was sent but did not arrive"]),
        ((*RECORDS, RECORDS[1]), ["layer.1 arrived twice"]),
        ((*RECORDS, replace(RECORDS[0], name="x")), ["x arrived but belongs to no tensor of this version"]),
        (
            (*RECORDS[:2], replace(RECORDS[2], checksum=5)),
            [f"layer.2: checksum 5 arrived, {RECORDS[2].checksum} was sent"],
        ),
        ((*RECORDS[:2], replace(RECORDS[2], shape=(4,))), ["layer.2: shape (4,) arrived, (2, 2) was sent"]),
        ((*RECORDS[:2], replace(RECORDS[2], dtype="bfloat16")), ["layer.2: dtype bfloat16 arrived, float32 was sent"]),
        ((), [f"layer.{i} was sent but did not arrive" for i in range(3)]),
    ],
    ids=["missing", "twice", "unknown", "checksum", "shape", "type", "nothing"],
)
def test_every_difference_is_told_by_name(arrived, expected):
    assert differences(SENT, arrived, NAMES) == expected


def test_a_tensor_the_trainer_forgot_is_noticed_by_the_engine():
    found = differences(SENT, RECORDS, [*NAMES, "lm_head.weight"])
    assert found == ["lm_head.weight is in the engine's checkpoint but was not sent"]


def test_a_tensor_that_comes_right_and_then_wrong_is_refused():
    """The later one is what the model holds."""
    assert len(differences(SENT, (*RECORDS, replace(RECORDS[0], checksum=1)), NAMES)) == 2


def test_a_manifest_survives_json():
    assert Manifest.from_json(SENT.to_json()) == SENT
