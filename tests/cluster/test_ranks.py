"""Sums over the ranks of one job."""

import torch

from rlhf_mp.cluster.ranks import Ranks


class Three(Ranks):
    """Rank 0 of three, of which the second holds a part of the first's model."""

    def __init__(self):
        super().__init__(0, 3)

    def gather(self, value):
        return [value, None, torch.tensor([10.0, 20.0])]


def test_ranks_with_the_same_data_count_once():
    assert Three().sum(torch.tensor([1.0, 2.0]), counts=True).tolist() == [11, 22]
    assert Three().sum(torch.tensor([1.0, 2.0]), counts=False).tolist() == [10, 20]


def test_a_single_rank_is_all_ranks():
    assert Ranks(0, 1).sum(torch.tensor([1.5]), counts=True).tolist() == [1.5]
