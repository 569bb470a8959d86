"""Any list of tensors goes through buckets unchanged, in bounded memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_mp.weights.buckets import Packer, Slot, unpack

CPU = torch.device("cpu")
SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=12)


def tensors(shapes: list[tuple[int, ...]]) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(len(shapes))
    return [(f"w{i}", torch.randn(shape, generator=generator)) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@given(SHAPES, st.integers(1, 300))
def test_every_tensor_arrives_once_in_order_and_cast(dtype, shapes, capacity):
    weights = tensors(shapes)
    arrived = []
    for bucket in Packer(capacity, CPU, shared=False).pack(weights, dtype):
        arrived += [(name, tensor.clone()) for name, tensor in bucket.tensors()]
    assert [name for name, _ in arrived] == [name for name, _ in weights]
    for (_, sent), (_, got) in zip(weights, arrived, strict=True):
        assert got.dtype == dtype and got.shape == sent.shape and torch.equal(got, sent.to(dtype))


@given(SHAPES, st.integers(1, 300))
def test_a_bucket_is_within_half_the_capacity_unless_one_tensor_is_larger(shapes, capacity):
    for bucket in Packer(capacity, CPU, shared=False).pack(tensors(shapes), torch.float32):
        filled = [slot for slot in bucket.slots if slot.num_bytes]
        assert bucket.data.numel() <= capacity // 2 or len(filled) == 1
        assert bucket.data.numel() == sum(slot.num_bytes for slot in bucket.slots)


def test_buckets_are_as_full_as_whole_tensors_allow():
    # 40, 40, 20 bytes fit into one of two buffers of 100; the next 4 don't; 200 has a bucket of its own
    shapes = [(10,), (10,), (5,), (1,), (50,), (2,)]
    buckets = Packer(200, CPU, shared=False).pack(tensors(shapes), torch.float32)
    assert [[slot.num_bytes for slot in bucket.slots] for bucket in buckets] == [[40, 40, 20], [4], [200], [8]]


def test_two_buffers_serve_every_bucket_and_every_version():
    packer = Packer(128, CPU, shared=True)
    places = {bucket.data.data_ptr() for _ in range(3) for bucket in packer.pack(tensors([(16,)] * 4), torch.float32)}
    assert len(places) == 2


def test_a_bucket_stays_as_it_is_while_the_next_one_is_filled():
    weights = tensors([(16,)] * 4)
    buckets = Packer(128, CPU, shared=False).pack(weights, torch.float32)
    previous = next(buckets)
    for (_, sent), bucket in zip(weights, buckets, strict=False):
        assert torch.equal(previous.tensors()[0][1], sent)
        previous = bucket


def test_a_larger_tensor_makes_the_buffer_grow():
    packer = Packer(8, CPU, shared=False)
    weights = tensors([(2,), (0,), (40,), (2,)])
    arrived = [x.clone() for bucket in packer.pack(weights, torch.float32) for _, x in bucket.tensors()]
    assert all(torch.equal(a, b) for a, (_, b) in zip(arrived, weights, strict=True))


@pytest.mark.parametrize("shared", [True, False])
def test_a_shared_buffer_can_be_mapped_by_another_process(shared):
    (bucket,) = Packer(64, CPU, shared=shared).pack(tensors([(4, 4)]), torch.float32)
    assert bucket.data.is_shared() == shared


def test_no_weights_make_no_bucket():
    assert [*Packer(64, CPU, shared=False).pack([], torch.float32)] == []


def test_unpacked_tensors_are_views_where_the_type_allows_it():
    data = torch.arange(24, dtype=torch.uint8)
    slots = [Slot("bytes", "uint8", (3,), 3), Slot("words", "float32", (2, 2), 16), Slot("rest", "uint8", (5,), 5)]
    found = dict(unpack(slots, data))
    assert found["bytes"].data_ptr() == data.data_ptr()
    assert found["words"].view(torch.uint8).flatten().tolist() == [*range(3, 19)]
    assert found["rest"].tolist() == [*range(19, 24)]
