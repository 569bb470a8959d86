"""Logits in chunks against logits at once: values, gradients, and what is in memory meanwhile."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf_mp.models.chunked_head import Scoring, VocabularySlices, head_outputs
from rlhf_mp.models.logprobs import token_logprobs_and_entropy
from rlhf_mp.observe.live_bytes import LiveBytes

N, H, V = 23, 6, 11
ROW = 4 * V  # bytes of one position's logits


def inputs(dtype: torch.dtype = torch.float32, bias: bool = True) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, offset = (torch.randn(*shape, generator=generator) for shape in ((N, H), (V, H), (V,)))
    weight, offset = 0.3 * weight, 0.3 * offset  # logits of size 1: their float32 rounding is below 1e-6
    tokens = torch.randint(V, (N,), generator=generator)
    leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight, offset)]
    return *leaves[: 3 if bias else 2], tokens


def loss(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    """Every position and both results with a weight of their own, in the size losses have."""
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(2, len(logprobs), generator=generator)
    return (logprobs * a + 0.1 * entropy * b).sum() / len(logprobs)


def at_once(hidden, weight, bias, tokens, temperature: float, entropy_grad: bool = True):
    logits = torch.nn.functional.linear(hidden, weight, bias).float() / temperature
    return token_logprobs_and_entropy(logits, tokens, entropy_grad=entropy_grad)


@pytest.mark.parametrize("chunk_bytes", [0, 1, ROW, 7 * ROW, N * ROW - 1, 10**9])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy_grad", [True, False])
def test_chunks_give_the_values_and_gradients_of_all_logits_at_once(chunk_bytes, temperature, entropy_grad):
    plain, chunked = inputs(), inputs()
    expected = at_once(*plain, temperature, entropy_grad)
    found = head_outputs(*chunked, Scoring(temperature, entropy_grad, chunk_bytes))
    assert found[1].requires_grad == entropy_grad
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    loss(*expected).backward()
    loss(*found).backward()
    for ours, theirs in zip(chunked[:3], plain[:3], strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-6)


def test_a_single_chunk_is_bit_identical_to_plain_autograd():
    plain, chunked = inputs(bias=False), inputs(bias=False)
    expected = at_once(plain[0], plain[1], None, plain[2], 1.0, entropy_grad=False)
    found = head_outputs(chunked[0], chunked[1], None, chunked[2], Scoring(1.0, False, 10**9))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    loss(*expected).backward()
    loss(*found).backward()
    assert all(torch.equal(ours.grad, theirs.grad) for ours, theirs in zip(chunked[:2], plain[:2], strict=True))


def test_gradients_are_right_to_finite_differences():
    hidden, weight, bias, tokens = inputs()
    scoring = Scoring(0.7, True, 4 * ROW)
    direction = torch.randn(V, H, generator=torch.Generator().manual_seed(2))

    def at(step: float) -> float:
        moved = weight.detach() + step * direction
        return loss(*head_outputs(hidden.detach(), moved, bias.detach(), tokens, scoring)).item()

    loss(*head_outputs(hidden, weight, bias, tokens, scoring)).backward()
    slope = (at(1e-2) - at(-1e-2)) / 2e-2
    assert (weight.grad * direction).sum().item() == pytest.approx(slope, rel=2e-3)


def test_a_frozen_head_costs_no_gradient():
    hidden, weight, bias, tokens = inputs()
    weight.requires_grad_(False)
    loss(*head_outputs(hidden, weight, bias, tokens, Scoring(1.0, True, ROW))).backward()
    assert weight.grad is None and hidden.grad.abs().max() > 0 and bias.grad.abs().max() > 0


@pytest.mark.parametrize("chunk_bytes", [0, 5 * ROW])
def test_bfloat16_heads_and_autocast_compute_in_bfloat16(chunk_bytes):
    exact = at_once(*inputs(), 1.0)
    half = inputs(torch.bfloat16)
    expected, found = at_once(*half, 1.0), head_outputs(*half, Scoring(1.0, True, chunk_bytes))
    mixed = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        autocast = head_outputs(*mixed, Scoring(1.0, True, chunk_bytes))
    for results in (found, autocast):
        assert results[0].dtype == torch.float32
        torch.testing.assert_close(results, expected, atol=1e-6, rtol=1e-6)
    assert (expected[0] - exact[0]).abs().max() > 1e-3  # it is not float32 after all
    for results in (found, autocast):
        loss(*results).backward()
    for ours, theirs in zip(mixed[:3], half[:3], strict=True):
        assert ours.grad.dtype == torch.float32 and theirs.grad.dtype == torch.bfloat16
        torch.testing.assert_close(theirs.grad.float(), ours.grad, atol=0.02, rtol=0.02)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor made while active."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() // x.element_size() for x in tree_leaves(result) if torch.is_tensor(x)]
        self.elements = max(self.elements, *sizes, 0)
        return result


def test_no_tensor_of_positions_by_vocabulary_ever_exists():
    positions, hidden_size, vocab, rows = 256, 16, 4096, 16
    hidden = torch.randn(positions, hidden_size, requires_grad=True)
    head = torch.nn.Linear(hidden_size, vocab, bias=False)
    tokens = torch.randint(vocab, (positions,))

    def measured(chunk_bytes: int) -> tuple[int, int]:
        with LiveBytes([head.weight]) as live, LargestTensor() as largest:
            outputs = head_outputs(hidden, head.weight, None, tokens, Scoring(0.9, True, chunk_bytes))
            loss(*outputs).backward()
        head.weight.grad = hidden.grad = None
        return live.peak, largest.elements

    peak, elements = measured(4 * vocab * rows)
    assert elements == rows * vocab  # the same as the head here; all logits are 16 times as many
    whole_peak, whole_elements = measured(0)
    assert whole_elements == positions * vocab
    # two float32 buffers of a chunk's logits, and the head's gradient; a little for hidden states and results
    assert peak < 2 * 4 * vocab * rows + head.weight.nbytes + 100_000
    assert whole_peak > 2 * 4 * vocab * positions


class Threads(dist.ProcessGroup):
    """A process group whose ranks are threads."""

    def __init__(self, size: int):
        super().__init__(0, size)
        self.barrier, self.found, self.ranks = threading.Barrier(size), [None] * size, threading.local()

    def rank(self) -> int:
        return self.ranks.own

    def all_reduce(self, tensor: torch.Tensor, op=dist.ReduceOp.SUM, group=None) -> None:
        self.found[self.rank()] = tensor.clone()
        self.barrier.wait(10)
        parts = torch.stack(self.found)
        self.barrier.wait(10)
        tensor.copy_(parts.amax(0) if op == dist.ReduceOp.MAX else parts.sum(0))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("width", [4, 8], ids=["one slice ends in padding", "one slice is padding alone"])
def test_slices_of_the_vocabulary_give_what_the_whole_does(monkeypatch, temperature, width):
    """Three ranks: 11 real tokens in slices of 4, or in slices of 8 of which the last has none."""
    group = Threads(3)
    monkeypatch.setattr(dist, "all_reduce", group.all_reduce)
    hidden, weight, bias, tokens = inputs()
    rows = torch.zeros(3 * width, H), torch.zeros(3 * width)
    rows[0][:V], rows[1][:V] = weight.detach(), bias.detach()
    rows[0][V:] = 50.0  # what pads the vocabulary may be anything
    scoring = Scoring(temperature, True, 4 * width * 5)

    def forward(rank: int):
        group.ranks.own = rank
        own = slice(rank * width, (rank + 1) * width)
        leaves = hidden.detach().clone().requires_grad_(), *(x[own].clone().requires_grad_() for x in rows)
        return leaves, head_outputs(*leaves, tokens, scoring, VocabularySlices(group, V))

    with ThreadPoolExecutor(3) as pool:
        ranks = list(pool.map(forward, range(3)))
    expected = at_once(hidden, weight, bias, tokens, temperature)
    for rank, (_, found) in enumerate(ranks):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
        group.ranks.own = rank
        loss(*found).backward()
    loss(*expected).backward()
    torch.testing.assert_close(sum(leaves[0].grad for leaves, _ in ranks), hidden.grad, atol=1e-6, rtol=1e-6)
    for part, (whole, real) in enumerate(((weight, weight.grad), (bias, bias.grad)), start=1):
        found = torch.cat([leaves[part].grad for leaves, _ in ranks])
        torch.testing.assert_close(found[:V], real, atol=1e-6, rtol=1e-6)
        assert not found[len(whole) :].any()


def test_a_cut_is_as_coarse_as_allowed_and_even():
    assert Scoring(1.0, False, 0).cut(10, V) == [slice(0, 10)]
    assert Scoring(1.0, False, 4 * ROW).cut(10, V) == [slice(0, 4), slice(4, 8), slice(8, 10)]
    assert Scoring(1.0, False, 9 * ROW).cut(10, V) == [slice(0, 5), slice(5, 10)]
    assert len(Scoring(1.0, False, 1).cut(10, V)) == 10
    assert Scoring(1.0, False, ROW).cut(0, V) == []
