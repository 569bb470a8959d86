"""Decode attention of a batch against SGLang's own, which takes one sequence after the other."""

import pytest
import torch

from rlhf_mp.rollout.batched_attention import CHUNK, decode

pytestmark = pytest.mark.engine  # importing SGLang takes as long as many tests together

OPTIONS = {"scaling": 0.3, "enable_gqa": True, "causal": False, "is_cross_attn": False, "sliding_window_size": None}


def problem(num: int, heads: int = 6, kv_heads: int = 2, width: int = 8, longest: int = 40, dtype=torch.float32):
    """Sequences whose tokens lie anywhere in the cache; pages of other requests lie between them."""
    generator = torch.Generator().manual_seed(num)
    rows = num + 3
    slots = torch.randperm(rows * longest, generator=generator).view(rows, longest).int()
    cache = torch.randn(2, rows * longest, kv_heads, width, generator=generator).to(dtype)
    query = torch.randn(num, heads, width, generator=generator).to(dtype)
    requests = torch.randperm(rows, generator=generator)[:num]
    lengths = torch.randint(1, longest + 1, (num,), generator=generator)
    return query, cache[0], cache[1], slots, requests, lengths


def both(query, *rest, **options) -> tuple[torch.Tensor, torch.Tensor]:
    module = pytest.importorskip("sglang.srt.layers.attention.torch_native_backend")
    kind = module.TorchNativeAttnBackend
    original, backend = kind._run_sdpa_forward_decode, kind.__new__(kind)
    theirs = original(backend, query, torch.zeros_like(query), *rest, **OPTIONS | options)
    ours = decode(original, backend, query, torch.zeros_like(query), *rest, **OPTIONS | options)
    return ours, theirs


@pytest.mark.parametrize("num", [1, 2, CHUNK, 3 * CHUNK + 1])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_equals_one_call_per_sequence(num, kv_heads):
    ours, theirs = both(*problem(num, kv_heads=kv_heads))
    assert ours.abs().sum() > 0
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_bfloat16_and_a_scale_that_is_not_given():
    ours, theirs = both(*problem(40, dtype=torch.bfloat16), scaling=None)
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)


def test_nothing_beyond_a_sequence_is_seen():
    query, keys, values, slots, requests, lengths = problem(20)
    before, _ = both(query, keys, values, slots, requests, lengths)
    own = torch.cat([slots[request, :length] for request, length in zip(requests, lengths, strict=True)])
    foreign = torch.ones(len(keys), dtype=torch.bool)
    foreign[own.long()] = False
    keys[foreign], values[foreign] = float("nan"), float("nan")
    after, _ = both(query, keys, values, slots, requests, lengths)
    assert torch.equal(before, after)


def test_a_sliding_window_is_left_to_the_original():
    ours, theirs = both(*problem(5), sliding_window_size=4)
    assert torch.equal(ours, theirs)
