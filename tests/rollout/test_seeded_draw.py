"""Seeded draws, against an independent SplitMix64, the probabilities they must follow, and what else is in a batch."""

import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rlhf_mp.rollout.seeded_draw import draw_likeliest, draw_on_cpu, likeliest, seed_each_request, seeds_of, uniform

SEEDS = st.integers(0, 2**63 - 1)
POSITIONS = st.integers(0, 2**20)


def draw(probabilities: list[float], seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    logprobs = torch.tensor(probabilities).log().expand(len(seeds), -1)
    return draw_on_cpu(None, logprobs, seeds, positions)[:, 0]


def split_mix(seed: int, position: int) -> float:
    """SplitMix64's finalizer in Python's unbounded integers, of the state seed * gamma + position * multiplier."""
    mask = 2**64 - 1
    x = (seed * 0x9E3779B97F4A7C15 + position * 6364136223846793005) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return ((x ^ (x >> 31)) >> 11) / 2**53


@given(SEEDS, POSITIONS)
def test_uniform_is_split_mix(seed, position):
    found = uniform(torch.tensor([seed]), torch.tensor([position])).item()
    assert found == split_mix(seed, position) and 0 <= found < 1


def test_uniform_fills_its_range_evenly_over_seeds_and_over_positions():
    many = torch.arange(20_000)
    for numbers in (uniform(many, torch.zeros_like(many)), uniform(torch.full_like(many, 5), many)):
        counts = torch.histc(numbers.float(), bins=20, min=0, max=1)
        chi_square = ((counts - 1000) ** 2 / 1000).sum().item()
        assert chi_square < 43.8  # 19 degrees of freedom: above it once in a thousand
        assert abs(torch.corrcoef(torch.stack([numbers[1:], numbers[:-1]]))[0, 1]) < 0.03


def test_draws_follow_the_probabilities():
    probabilities = [0.05, 0.5, 0.0, 0.15, 0.3, 0.0]
    num = 20_000
    tokens = draw(probabilities, torch.arange(num) * 7919, torch.arange(num) % 50)
    counts = torch.bincount(tokens, minlength=6)
    assert counts[2] == counts[5] == 0
    expected = torch.tensor([p for p in probabilities if p]) * num
    chi_square = ((counts[counts > 0] - expected) ** 2 / expected).sum().item()
    assert chi_square < 16.3  # 3 degrees of freedom: above it once in a thousand


def test_probabilities_need_not_add_up_to_1():
    """Rounding, or tokens that a filter has taken away."""
    tokens = draw([0.1, 0.4], torch.arange(4000), torch.arange(4000))
    assert tokens.float().mean().item() == pytest.approx(0.8, abs=0.03)


@example(seed=0, position=0, weights=[0.0, 0.25])  # of these the uniform number is exactly 0
@given(SEEDS, POSITIONS, st.lists(st.sampled_from([0.0, 1e-30, 0.25, 3.0]), min_size=1, max_size=8).filter(any))
def test_a_token_of_probability_0_is_never_drawn_wherever_it_stands(seed, position, weights):
    total = sum(weights)
    (token,) = draw([w / total for w in weights], torch.tensor([seed]), torch.tensor([position])).tolist()
    assert weights[token] > 0


def test_a_draw_depends_on_its_own_seed_and_position_alone():
    probabilities = [0.1] * 10
    seeds, positions = torch.tensor([5, 9, 5, 5]), torch.tensor([2, 2, 2, 3])
    together = draw(probabilities, seeds, positions)
    alone = [draw(probabilities, seeds[i : i + 1], positions[i : i + 1]).item() for i in range(4)]
    assert together.tolist() == alone and alone[0] == alone[2]
    assert len(set(draw(probabilities, torch.arange(50), torch.full((50,), 2)).tolist())) > 5


def test_on_a_gpu_sglangs_own_kernel_draws():
    on_gpu = SimpleNamespace(is_cpu=False)
    assert draw_on_cpu(lambda *given: given, on_gpu, "seed", "positions") == (on_gpu, "seed", "positions")


def request(seed: int | None, name: str = "a name") -> SimpleNamespace:
    return SimpleNamespace(rid=name, sampling_params=SimpleNamespace(sampling_seed=seed))


def test_every_request_has_a_seed_its_own_or_one_of_its_name():
    found = seeds_of([request(3), request(None, "b"), request(2**62), request(None, "c")])
    assert found[0] == 3 and found[2] == 2**62
    assert len(set(found)) == 4 and all(0 <= seed < 2**63 for seed in found)
    assert seeds_of([request(None, "c"), request(None, "b")]) == [found[3], found[1]]  # on every worker the same


@pytest.mark.parametrize(("backend", "expected"), [("pytorch", [3, 5]), ("flashinfer", None)])
def test_a_sampler_that_takes_no_seeds_gets_none(monkeypatch, backend, expected):
    context = SimpleNamespace(get_flags=lambda: SimpleNamespace(sampling_backend=backend))
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    gathered = SimpleNamespace(device="cpu", sampling_seed=None)
    found = seed_each_request(gathered, None, SimpleNamespace(reqs=[request(3), request(5)]), 10).sampling_seed
    assert (found if found is None else found.tolist()) == expected


ALL = 1 << 30  # SGLang's word for no top-k


@given(st.lists(st.integers(0, 20), min_size=2, max_size=12).filter(any), st.integers(1, 12), st.floats(0.05, 0.999))
def test_the_likeliest_are_those_of_sglangs_own_rule(weights, k, p):
    """Token by token, from the likeliest on: one is left out that is not among the first k, or that comes when the
    likelier ones have more than p."""
    probs = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    expected, likelier = [0.0] * len(weights), 0.0
    for rank, token in enumerate(sorted(range(len(weights)), key=lambda token: -weights[token])):
        if rank < k and likelier <= p:
            expected[token] = probs[token].item()
        likelier += probs[token].item()
        if abs(likelier - p) < 1e-9:  # rounding decides
            return
    found = likeliest(probs[None], torch.tensor([k]), torch.tensor([p], dtype=torch.float64))
    assert found[0].tolist() == expected


def test_a_row_without_top_k_and_top_p_keeps_every_token_bit_for_bit():
    probs = torch.randn(64, 5000, generator=torch.Generator().manual_seed(2)).mul(4).softmax(-1)
    assert torch.equal(likeliest(probs, torch.full((64,), ALL), torch.ones(64)), probs)


def test_the_likeliest_of_equals_is_the_one_that_a_greedy_batch_takes():
    probs = torch.tensor([[0.1, 0.3, 0.3, 0.3]])
    assert likeliest(probs, torch.tensor([1]), torch.ones(1)).argmax(-1).item() == probs.argmax(-1).item() == 1


def test_min_p_and_unseeded_draws_are_sglangs_own():
    for min_p, seed in ((True, "seeds"), (False, None)):
        given_ = ("probs", "ks", "ps", "min", min_p, seed, "positions")
        assert draw_likeliest(lambda *arguments: arguments, *given_) == given_
