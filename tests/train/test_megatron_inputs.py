"""Micro-batches to Megatron and back: every token's value comes home to its token, padding or not."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist

from rlhf_mp.data.types import TokenBatch
from rlhf_mp.train import megatron_cpu

if find_spec("mbridge") is None:
    pytest.skip("Megatron is not installed", allow_module_level=True)
megatron_cpu.install()

from rlhf_mp.train.megatron_inputs import packed, padded  # noqa: E402
from rlhf_mp.train.megatron_layers import zigzag_positions  # noqa: E402


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """This process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def batch(lengths: list[int], width: int) -> TokenBatch:
    """Token t of row r is 100 r + t."""
    rows = len(lengths)
    tokens = 100 * torch.arange(rows)[:, None] + torch.arange(width)
    return TokenBatch(
        tokens=tokens,
        mask=torch.ones(rows, width),
        rewards=torch.zeros(rows),
        group_ids=torch.zeros(rows, dtype=torch.long),
        lengths=torch.tensor(lengths),
        rollout_logprobs=torch.zeros(rows, width),
    )


@pytest.mark.parametrize("multiple", [1, 2, 4])
def test_packed_rows_come_back_where_they_were(multiple):
    made = packed(batch([5, 2, 3], 5), multiple)
    assert made.tokens.shape == made.targets.shape == made.positions.shape
    starts = made.packed.cu_seqlens_q.tolist()
    assert all(start % multiple == 0 for start in starts)
    for row, (start, length) in enumerate(zip(starts, [5, 2, 3], strict=False)):
        assert made.tokens[0, start : start + length].tolist() == [100 * row + t for t in range(length)]
        assert made.positions[0, start : start + length].tolist() == list(range(length))
    home = made.restore(made.targets.float())
    assert home.tolist() == [[0, 1, 2, 3, 4], [0, 101, 0, 0, 0], [0, 201, 202, 0, 0]]


@pytest.mark.parametrize("multiple", [1, 2, 4])
def test_the_last_token_of_every_row_is_found(group, multiple):
    lengths, last = [5, 2, 3], [4, 101, 202]
    for made in (packed(batch(lengths, 5), multiple), padded(batch(lengths, 5), group, multiple)):
        assert made.at_last(made.tokens.float()).tolist() == last
    stub = batch(lengths, 5).silenced()  # two tokens of a row that says it has five
    for made in (packed(stub, multiple), padded(stub, group, multiple)):
        assert made.at_last(made.tokens.float()).tolist() == [1]


def test_packing_leaves_out_the_padding():
    assert packed(batch([5, 2, 3], 5), 1).tokens.shape == (1, 10)


def test_a_row_longer_than_its_batch_is_cut():
    """So is an empty micro-batch made: the first two tokens of a longer row."""
    made = packed(batch([9], 4).silenced(), 1)
    assert made.restore(made.targets.float()).tolist() == [[0, 1]]


@pytest.mark.parametrize(("multiple", "length"), [(1, 5), (2, 6), (4, 8)])
def test_padded_rows_come_back_where_they_were(group, multiple, length):
    made = padded(batch([5, 2, 3], 5), group, multiple)
    assert made.tokens.shape == (3, length)
    assert made.positions[2].tolist() == list(range(length))
    home = made.restore(made.targets.float())
    assert home[:, 0].tolist() == [0, 0, 0]
    assert torch.equal(home[:, 1:], batch([5, 2, 3], 5).tokens[:, 1:].float())


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_context_parallel_ranks_share_positions_and_work_evenly(ranks):
    length = 2 * ranks * 5
    shares = [zigzag_positions(rank, ranks, length, torch.device("cpu")) for rank in range(ranks)]
    assert torch.cat(shares).sort().values.tolist() == list(range(length))
    assert len({int((share + 1).sum()) for share in shares}) == 1  # position p attends to p + 1 keys
