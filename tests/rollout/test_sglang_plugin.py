"""Seeded sampling on CPU, against an independent SplitMix64 and against the probabilities it must follow."""

import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rlhf_mp.rollout import sglang_plugin
from rlhf_mp.rollout.sglang_plugin import draw_on_cpu, seed_each_request, uniform

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


def batch_of(*seeds: int | None) -> SimpleNamespace:
    return SimpleNamespace(reqs=[SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=s)) for s in seeds])


def test_a_batch_is_seeded_when_every_request_is():
    result = SimpleNamespace(device="cpu", sampling_seed=None)
    assert seed_each_request(result, None, batch_of(3, 2**62), 10).sampling_seed.tolist() == [3, 2**62]
    result = SimpleNamespace(device="cpu", sampling_seed=None)
    assert seed_each_request(result, None, batch_of(3, None), 10).sampling_seed is None


@pytest.mark.parametrize("value", [None, "0"])
def test_the_plugin_is_inert_outside_our_servers(monkeypatch, value):
    """Every SGLang on this machine finds it through the entry point."""
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", None)  # importing it would fail
    if value is None:
        monkeypatch.delenv(sglang_plugin.ACTIVE, raising=False)
    else:
        monkeypatch.setenv(sglang_plugin.ACTIVE, value)
    sglang_plugin.install()
    monkeypatch.setenv(sglang_plugin.ACTIVE, "1")
    with pytest.raises(ImportError):
        sglang_plugin.install()


def test_only_a_head_that_has_a_bias_loses_its_random_start():
    class Model(torch.nn.Module):
        def __init__(self, bias: bool):
            super().__init__()
            self.score = torch.nn.Linear(4, 1, bias=bias)

    torch.manual_seed(0)
    model, bare = Model(bias=True), Model(bias=False)
    assert model.score.bias.item() != 0
    before = model.score.weight.clone()
    for each in (model, bare, torch.nn.Linear(2, 2)):
        sglang_plugin.clear_bias(each)
    assert model.score.bias.item() == 0 and torch.equal(model.score.weight, before)
