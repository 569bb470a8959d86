import pytest
import torch

from rlhf_mp.algorithms.aggregate import loss_aggregations
from rlhf_mp.algorithms.masked import masked, masked_sum
from rlhf_mp.data.types import Totals

PER_TOKEN = torch.tensor([[9.0, 1.0, 2.0, 3.0], [9.0, 10.0, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0]])
MASK = torch.tensor([[0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
WHOLE = Totals(num_tokens=4, num_sequences=3)


@pytest.mark.parametrize(
    "mode, expected",
    [
        ("token-mean", (1 + 2 + 3 + 10) / 4),
        ("seq-mean-token-sum", (6 + 10 + 0) / 3),
        ("seq-mean-token-mean", (6 / 3 + 10 / 1 + 0) / 3),  # the sequence without tokens adds 0, not nan
    ],
)
def test_each_mode_by_hand(mode, expected):
    assert loss_aggregations[mode](PER_TOKEN, MASK, WHOLE).item() == pytest.approx(expected)


@pytest.mark.parametrize("mode", [*loss_aggregations])
def test_parts_of_a_minibatch_add_up_and_padding_adds_nothing(mode):
    aggregate = loss_aggregations[mode]
    pad = torch.nn.functional.pad
    parts = [slice(0, 1), slice(1, 3)]
    total = sum(aggregate(pad(PER_TOKEN[rows], (0, 2), value=7.0), pad(MASK[rows], (0, 2)), WHOLE) for rows in parts)
    torch.testing.assert_close(total, aggregate(PER_TOKEN, MASK, WHOLE))


@pytest.mark.parametrize("mode", [*loss_aggregations])
def test_nothing_masked_in_gives_zero_that_can_still_be_differentiated(mode):
    """An empty micro-batch takes part in the collective backward pass and changes nothing."""
    per_token = PER_TOKEN.clone().requires_grad_()
    loss = loss_aggregations[mode](per_token, torch.zeros_like(MASK), Totals(num_tokens=1, num_sequences=3))
    loss.backward()
    assert loss.item() == 0
    assert not per_token.grad.any()


def test_what_is_masked_out_does_not_matter_even_if_it_is_not_a_number():
    x = torch.tensor([[float("nan"), 2.0, float("inf")]], requires_grad=True)
    mask = torch.tensor([[0.0, 1.0, 0.0]])
    assert masked(x, mask).tolist() == [[0.0, 2.0, 0.0]]
    masked_sum(x, mask).backward()
    assert x.grad.tolist() == [[0.0, 1.0, 0.0]]
