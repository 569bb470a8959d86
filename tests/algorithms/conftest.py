"""Batches for estimators and losses."""

import pytest
import torch

from rlhf_mp.algorithms.token_advantages import on_last_token
from rlhf_mp.data.types import TokenBatch


def make_batch(rewards, groups, mask, **fields) -> TokenBatch:
    rewards, mask = torch.as_tensor(rewards), torch.as_tensor(mask)
    mask = mask.to(rewards.dtype)
    num_rows, width = mask.shape
    return TokenBatch(
        tokens=fields.pop("tokens", torch.arange(num_rows * width).view(num_rows, width)),
        mask=mask,
        rewards=rewards,
        group_ids=torch.as_tensor(groups),
        lengths=torch.full((num_rows,), width),
        rollout_logprobs=fields.pop("rollout_logprobs", torch.zeros_like(mask)),
        token_rewards=fields.pop("token_rewards", on_last_token(rewards, mask)),
        **fields,
    )


@pytest.fixture
def batch_of():
    return make_batch


@pytest.fixture
def random_batch():
    """Whole groups of 1 to 4 responses of chosen and unchosen tokens, one of them empty; float64."""

    def make(seed: int, num_groups: int = 5, width: int = 7) -> TokenBatch:
        g = torch.Generator().manual_seed(seed)
        sizes = torch.randint(2, 5, (num_groups,), generator=g).tolist()
        groups = [100 - i for i, size in enumerate(sizes) for _ in range(size)]
        rows = len(groups)
        mask = (torch.rand(rows, width, generator=g) < 0.6).double()
        mask[:, 0] = 0
        mask[1] = 0

        def noise() -> torch.Tensor:
            return torch.rand(rows, width, generator=g, dtype=torch.float64) * mask

        return make_batch(
            torch.randint(0, 4, (rows,), generator=g).double() / 2,
            groups,
            mask,
            tokens=torch.randint(0, 50, (rows, width), generator=g),
            old_logprobs=-2 * noise(),
            ref_logprobs=-2 * noise(),
            rollout_logprobs=-2 * noise(),
            values=noise() - 0.5 * mask,
            baselines=torch.rand(rows, generator=g, dtype=torch.float64),
        )

    return make
