"""Every response draws its tokens from its own seed, inside SGLang's workers: whatever else is in the batch.

SGLang draws from seeds only together with its deterministic kernels, which not every attention backend has. Three
things of a batch change its draws; each is taken out here:

1. One request without a seed, or a batch without seeds that another is merged into, takes them from all: so every
   request has one.
2. One request that draws greedily or by top-k or top-p sends all through a draw by place in the order of likelihood,
   where the same number means another token: so tokens keep their places in the vocabulary.
3. The hash is a Triton kernel: on CPU there is none, so a number comes from ``uniform``.

What remains is rounding of the logits, which depends on what is computed together.

Shapes: N requests, V tokens of the vocabulary.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


def seed_each_request(result: Any, cls: type, batch: Any, vocab_size: int) -> Any:
    """After SGLang has gathered the sampling parameters of a batch."""
    from sglang.srt.runtime_context import get_flags

    if get_flags().sampling_backend != "flashinfer":  # which takes no seeds: rollout.reproducible starts another
        result.sampling_seed = torch.tensor(seeds_of(batch.reqs)).to(result.device, non_blocking=True)
    return result


def seeds_of(requests: Sequence[Any]) -> list[int]:
    """Requests without a seed get one from their names, which are random, and the same on every worker."""
    given = [(request.sampling_params.sampling_seed, request.rid) for request in requests]
    return [_seed_of_name(name) if seed is None else seed for seed, name in given]


def _seed_of_name(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def draw_likeliest(
    original: Callable,
    probs: Float[Tensor, "N V"],
    top_ks: Int[Tensor, "N"],
    top_ps: Float[Tensor, "N"],
    min_ps: Float[Tensor, "N"],
    need_min_p_sampling: bool,
    sampling_seed: Int[Tensor, "N"] | None,
    positions: Int[Tensor, "N"],
) -> Int[Tensor, "N"]:
    """Around SGLang's draw for batches with a top-k or top-p in them. Rows without either draw as they do alone."""
    if sampling_seed is None or need_min_p_sampling:  # SGLang refuses the two together; we ask for no min-p
        return original(probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions)
    from sglang.srt.layers.sampler import sampling_from_probs_torch

    return sampling_from_probs_torch(likeliest(probs, top_ks, top_ps), sampling_seed, positions)


def likeliest(
    probs: Float[Tensor, "N V"], top_ks: Int[Tensor, "N"], top_ps: Float[Tensor, "N"]
) -> Float[Tensor, "N V"]:
    """Zero for tokens that a row's top-k or top-p leaves out; the others stay, and no longer add up to 1."""
    ordered, tokens = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    likelier = ordered.cumsum(-1) - ordered
    beyond_p = (likelier > top_ps[:, None]) & (top_ps[:, None] < 1)  # rounding alone may bring a sum above 1
    ordered[(rank >= top_ks[:, None]) | beyond_p] = 0.0
    return torch.empty_like(ordered).scatter_(-1, tokens, ordered)


def draw_on_cpu(
    original: Callable, logprobs: Float[Tensor, "N V"], seed: Int[Tensor, "N"], positions: Int[Tensor, "N"]
) -> Int[Tensor, "N 1"]:
    """Around the seeded draw itself: on CPU one uniform number a row, by inverse CDF."""
    if not logprobs.is_cpu:
        return original(logprobs, seed, positions)
    cdf = logprobs.double().exp().cumsum(-1)
    threshold = uniform(seed, positions)[:, None] * cdf[:, -1:]
    return torch.searchsorted(cdf, threshold, right=True).clamp_(max=logprobs.shape[1] - 1)


def uniform(seed: Int[Tensor, "N"], position: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """float64 numbers in [0, 1), a function of (seed, position) alone.

    Source: SplitMix64, Steele, Lea and Flood, OOPSLA 2014, fig. 16; int64 arithmetic wraps as the original's does.
    """

    def shifted(x: Tensor, bits: int) -> Tensor:  # logical, not arithmetic
        return (x >> bits) & ((1 << (64 - bits)) - 1)

    x = seed.long() * -7046029254386353131 + position.long() * 6364136223846793005
    x = (x ^ shifted(x, 30)) * -4658895280553007687
    x = (x ^ shifted(x, 27)) * -7723592293110705685
    return shifted(x ^ shifted(x, 31), 11).double() * 2.0**-53
