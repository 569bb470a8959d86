"""The learning rate as a factor, against numbers a reader can work out."""

import pytest
import torch

from rlhf_mp.config.schema import OptimConfig
from rlhf_mp.train.optimizer import learning_rate_factor, make_optimizer


def factors(num_steps: int, steps: list[int], **optim) -> list[float]:
    factor = learning_rate_factor(OptimConfig(**optim), num_steps)
    return [factor(step) for step in steps]


def test_warm_up_rises_in_equal_parts_and_the_first_step_already_moves():
    expected = [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert factors(100, [0, 1, 2, 3, 4, 99], lr_warmup_steps=4) == expected


def test_without_warm_up_the_first_step_has_the_whole_rate():
    for kind in ("constant", "linear", "cosine"):
        assert factors(10, [0], lr_scheduler_type=kind) == [1.0]


def test_linear_decay_by_hand():
    # 2 warm-up steps of 10: the 8 others go from 1 to 0.2 in steps of 0.8 / 8
    found = factors(10, [1, 2, 3, 6, 10], lr_warmup_steps=2, lr_scheduler_type="linear", min_lr_ratio=0.2)
    assert found == pytest.approx([1.0, 1.0, 0.9, 0.6, 0.2])


def test_cosine_decay_by_hand():
    # progress 0, 1/4, 1/2, 1: (1 + cos) / 2 = 1, 0.853553, 0.5, 0
    found = factors(8, [0, 2, 4, 8], lr_scheduler_type="cosine", min_lr_ratio=0.1)
    assert found == pytest.approx([1.0, 0.1 + 0.9 * 0.8535534, 0.55, 0.1])


def test_the_last_planned_step_still_learns_and_later_ones_stay_at_the_end():
    assert factors(4, [3, 4, 9], lr_scheduler_type="linear") == [0.25, 0.0, 0.0]


def test_a_run_shorter_than_its_warm_up_only_warms_up():
    assert factors(3, [0, 1, 2], lr_warmup_steps=10, lr_scheduler_type="cosine") == [0.1, 0.2, 0.3]


def test_sgd_by_hand():
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = make_optimizer([weight], OptimConfig(optimizer="sgd", lr=0.1, momentum=0.5, weight_decay=0.2))
    seen = []
    for _ in range(2):
        weight.grad = torch.tensor([1.0])
        optimizer.step()
        seen.append(weight.item())
    # 1 + 0.2 x 1 = 1.2, 1 - 0.1 x 1.2 = 0.88; then 0.5 x 1.2 + 1 + 0.2 x 0.88 = 1.776, 0.88 - 0.1776
    assert seen == pytest.approx([0.88, 0.7024])


def test_adamw_is_what_nobody_chose():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = make_optimizer([weight], OptimConfig(lr=0.1, betas=[0.8, 0.9], eps=0.3, weight_decay=0.2))
    expected = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 0.3, "weight_decay": 0.2}
    assert type(optimizer) is torch.optim.AdamW
    assert {name: optimizer.param_groups[0][name] for name in expected} == expected
