"""The critic's loss by hand, against a loop over tokens, and its invariances; how good values are, by hand."""

import pytest
import torch

from rlhf_mp.algorithms.value_loss import clipped_value_loss, make_value_loss, value_metrics
from rlhf_mp.config.schema import CriticConfig
from rlhf_mp.data.types import TokenBatch, Totals, ValueOutput


def batch(mask, *, values=None, returns=None, seed: int = 0) -> TokenBatch:
    mask = torch.as_tensor(mask, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    rows, width = mask.shape
    if values is None:
        values, returns = (torch.randn(rows, width, generator=generator) * mask for _ in range(2))
    return TokenBatch(
        tokens=torch.zeros(rows, width, dtype=torch.long),
        mask=mask,
        rewards=torch.zeros(rows),
        group_ids=torch.arange(rows),
        lengths=torch.full((rows,), width),
        rollout_logprobs=torch.zeros(rows, width),
        values=torch.as_tensor(values),
        returns=torch.as_tensor(returns),
    )


def totals_of(b: TokenBatch) -> Totals:
    return Totals(int(b.mask.sum()), len(b.mask))


def test_one_token_of_each_kind_by_hand():
    # old value 1, return 3, clip 0.5
    values = torch.tensor([[1.2, 2.0, 0.0, 4.0]])
    loss, clipped = clipped_value_loss(values, torch.ones(1, 4), torch.full((1, 4), 3.0), 0.5)
    # 1.2: within the clip, (1.2 - 3)^2 / 2 = 1.62
    # 2.0: moved by 1 towards the return, held at 1.5: max(1, 2.25) / 2 = 1.125
    # 0.0: moved by 1 away from it, held at 0.5: max(9, 6.25) / 2 = 4.5, the free one
    # 4.0: moved by 3 beyond it, held at 1.5: max(1, 2.25) / 2 = 1.125
    torch.testing.assert_close(loss, torch.tensor([[1.62, 1.125, 4.5, 1.125]]))
    assert clipped.tolist() == [[0.0, 1.0, 0.0, 1.0]]


def test_a_value_that_moved_too_far_towards_its_return_gets_no_gradient():
    values = torch.tensor([[1.2, 2.0, 0.0]], requires_grad=True)
    clipped_value_loss(values, torch.ones(1, 3), torch.full((1, 3), 3.0), 0.5)[0].sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([[1.2 - 3, 0.0, 0.0 - 3]]))


def naive(values, b: TokenBatch, clip: float, mode: str) -> float:
    rows = []
    for v, old, ret, mask in zip(values, b.values, b.returns, b.mask, strict=True):
        errors = []
        for t in range(len(mask)):
            if mask[t]:
                near = min(max(v[t], old[t] - clip), old[t] + clip)
                errors.append(0.5 * max((v[t] - ret[t]) ** 2, (near - ret[t]) ** 2))
        rows.append(errors)
    if mode == "token-mean":
        flat = [e for errors in rows for e in errors]
        return float(sum(flat) / len(flat))
    per_row = [sum(e) / (len(e) if mode.endswith("token-mean") else 1) for e in rows]
    return float(sum(per_row) / len(rows))


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_the_loss_is_that_of_a_loop_over_tokens(mode):
    b = batch([[0, 1, 1, 0, 1], [0, 1, 0, 0, 0], [0, 0, 1, 1, 0]])
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(9))
    loss, metrics = make_value_loss(CriticConfig(cliprange_value=0.3, loss_agg_mode=mode))(
        ValueOutput(values), b, totals_of(b)
    )
    assert loss.item() == pytest.approx(naive(values, b, 0.3, mode), rel=1e-6)
    total, count = metrics["loss"]
    assert total.item() == pytest.approx(loss.item()) and count.item() == 1.0


def test_parts_add_up_to_the_whole_and_padding_counts_for_nothing():
    b = batch([[0, 1, 1, 0, 1], [0, 1, 0, 0, 0], [0, 0, 1, 1, 0]])
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(9))
    value_loss = make_value_loss(CriticConfig())
    whole, metrics = value_loss(ValueOutput(values), b, totals_of(b))
    parts = [value_loss(ValueOutput(values[rows]), b.select(rows), totals_of(b)) for rows in ([2, 0], [1])]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole.item())
    for name, (total, count) in metrics.items():
        assert sum(m[name][0].item() for _, m in parts) == pytest.approx(total.item()), name
        assert sum(m[name][1].item() for _, m in parts) == pytest.approx(count.item()), name
    spoiled = values.masked_fill(b.mask == 0, float("nan")).requires_grad_()
    loss, _ = value_loss(ValueOutput(spoiled), b, totals_of(b))
    loss.backward()
    assert loss.item() == whole.item() and not spoiled.grad.isnan().any()


def test_an_empty_micro_batch_adds_nothing():
    b = batch([[0, 1, 1]])
    loss, metrics = make_value_loss(CriticConfig())(
        ValueOutput(torch.ones(1, 2, requires_grad=True)), b.silenced(), totals_of(b)
    )
    assert loss.item() == 0 and [pair[1].item() for pair in metrics.values()] == [0, 0]


def test_how_good_values_are_by_hand():
    # values 1 2 3, returns 2 2 5: means 2 and 3, variances 2/3 and 2; errors 1 0 2 have variance 2/3
    b = batch([[0, 1, 1, 1]], values=[[9.0, 1.0, 2.0, 3.0]], returns=[[9.0, 2.0, 2.0, 5.0]])
    metrics = {name: total for name, (total, _) in value_metrics(b, lambda x: x).items()}
    expected = {
        "value_mean": 2.0,
        "value_std": (2 / 3) ** 0.5,
        "return_mean": 3.0,
        "return_std": 2**0.5,
        "explained_variance": 1 - (2 / 3) / 2,
    }
    assert metrics == pytest.approx(expected)


def test_the_number_of_ranks_changes_nothing():
    whole = batch([[0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 1, 1]], seed=3)
    expected = value_metrics(whole, lambda x: x)
    first, second = whole.select([0, 2]), whole.select([1])
    # what the other rank hands in at each of the two sums, recorded by letting it go first
    calls, mine = [], []

    def of_second(x):
        return (calls.append(x), x)[1]

    value_metrics(second, of_second)
    count_and_sums = calls[0] + torch.cat([torch.tensor([float(first.mask.sum())]).double(), masked_sums(first)])

    def total(x):
        mine.append(x)
        if len(mine) == 1:
            return count_and_sums
        return x + squares(second, count_and_sums)

    assert value_metrics(first, total) == {k: (pytest.approx(v), n) for k, (v, n) in expected.items()}


def columns_of(b: TokenBatch) -> torch.Tensor:
    return torch.stack([b.values, b.returns, b.returns - b.values]).double()[:, b.mask > 0]


def masked_sums(b: TokenBatch) -> torch.Tensor:
    return columns_of(b).sum(1)


def squares(b: TokenBatch, count_and_sums: torch.Tensor) -> torch.Tensor:
    mean = count_and_sums[1:] / count_and_sums[0]
    return (columns_of(b) - mean[:, None]).square().sum(1)


def test_equal_returns_and_no_tokens_give_no_nan():
    b = batch([[0, 1, 1]], values=[[0.0, 1.0, 2.0]], returns=[[0.0, 1.0, 1.0]])
    assert "explained_variance" not in value_metrics(b, lambda x: x)
    none = value_metrics(batch([[0, 0, 0]]), lambda x: x)
    assert all(total == 0 for total, _ in none.values())
