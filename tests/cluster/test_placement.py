"""Which GPUs each engine has: a pure function, so every layout can be looked at on any machine."""

import pytest

from rlhf_mp.cluster.placement import place
from rlhf_mp.config.load import config_from_dict


def plans(num_gpus: int, tp: int, on_cpu: bool = False, num_nodes: int = 1, **rollout):
    tree = {
        "data": {"train_batch_size": 64},
        "actor_rollout_ref": {
            "model": {"path": "models/m"},
            "actor": {"ppo_mini_batch_size": 64},
            "rollout": {"tensor_model_parallel_size": tp, **rollout},
        },
        "trainer": {"nnodes": num_nodes, "n_gpus_per_node": num_gpus, "seed": 5, "device": "cpu" if on_cpu else "cuda"},
    }
    return place(config_from_dict(tree), on_cpu)


@pytest.mark.parametrize(
    ("num_gpus", "tp", "expected"),
    [
        (1, 1, [(0,)]),
        (4, 1, [(0,), (1,), (2,), (3,)]),
        (8, 2, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (8, 8, [tuple(range(8))]),
    ],
)
def test_engines_share_out_the_gpus_of_a_machine(num_gpus, tp, expected):
    placement = plans(num_gpus, tp)
    assert [server.gpus for server in placement.servers] == expected
    assert placement.num_ranks == num_gpus


def test_no_gpu_belongs_to_two_engines_of_one_machine():
    for num_gpus, tp in [(8, 1), (8, 2), (8, 4), (6, 3)]:
        used = [gpu for server in plans(num_gpus, tp).servers for gpu in server.gpus]
        assert sorted(used) == list(range(num_gpus))


def test_on_several_machines_gpus_are_counted_from_0_on_each():
    placement = plans(4, 2, num_nodes=2)
    assert [server.gpus for server in placement.servers] == [(0, 1), (2, 3)] * 2
    assert [server.node for server in placement.servers] == [0, 0, 1, 1]
    assert placement.num_ranks == 8


@pytest.mark.parametrize(
    ("engines", "nodes", "expected"), [(1, 2, [0]), (2, 2, [0, 1]), (3, 2, [0, 0, 1]), (5, 3, [0, 0, 1, 1, 2])]
)
def test_engines_are_spread_evenly_over_the_machines(engines, nodes, expected):
    servers = plans(4, 1, on_cpu=True, num_nodes=nodes, num_engines=engines).servers
    assert [server.node for server in servers] == expected


def test_fewer_engines_than_gpus_start_at_gpu_0_of_every_machine():
    servers = plans(4, 2, num_nodes=2, num_engines=2).servers
    assert [(server.node, server.gpus) for server in servers] == [(0, (0, 1)), (1, (0, 1))]


def test_on_cpu_engines_have_no_gpu_and_any_number_goes():
    placement = plans(2, 1, on_cpu=True, num_engines=3)
    assert [(server.gpus, server.on_cpu) for server in placement.servers] == [((), True)] * 3


def test_every_engine_has_the_model_a_number_and_a_seed_of_its_own():
    servers = plans(4, 1).servers
    assert [server.index for server in servers] == [0, 1, 2, 3]
    assert [server.seed for server in servers] == [5, 6, 7, 8]
    assert {server.model_path for server in servers} == {"models/m"}


def test_every_process_works_out_the_same_placement():
    assert plans(8, 2) == plans(8, 2)
