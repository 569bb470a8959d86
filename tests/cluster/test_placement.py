"""Which GPUs each engine has: a pure function, so every layout can be looked at on any machine."""

import pytest

from rlhf_mp.cluster.placement import on_host, place
from rlhf_mp.config.load import config_from_dict
from rlhf_mp.errors import ConfigError


def plans(num_gpus, tp, on_cpu=False, num_nodes=1, placement="colocated", cores=(), reward_model=None, **rollout):
    tree = {
        "data": {"train_batch_size": 64},
        "actor_rollout_ref": {
            "model": {"path": "models/m"},
            "actor": {"ppo_mini_batch_size": 64},
            "rollout": {"tensor_model_parallel_size": tp, **rollout},
        },
        "trainer": {"nnodes": num_nodes, "n_gpus_per_node": num_gpus, "seed": 5, "device": "cpu" if on_cpu else "cuda"},
    }
    tree["trainer"]["placement"] = placement
    if reward_model is not None:
        own = {"enable": True, "strategy": "sglang", "model": {"path": "models/rm"}, "rollout": reward_model}
        tree["reward_model"] = own
    return place(config_from_dict(tree), on_cpu, cores)


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


@pytest.mark.parametrize(
    ("nodes", "tp", "rollout", "expected"),
    [
        (4, 4, {}, [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)]),
        (4, 8, {}, [(0, 0, 0), (0, 1, 1), (0, 2, 2), (0, 3, 3)]),
        (4, 4, {"num_engines": 1}, [(0, 0, 0), (0, 1, 1)]),
        (2, 2, {}, [(0, 0, 0), (1, 0, 1)]),
    ],
)
def test_a_wider_engine_lies_on_neighbouring_machines_and_has_all_of_their_gpus(nodes, tp, rollout, expected):
    servers = plans(2, tp, on_cpu=False, num_nodes=nodes, allow_cross_node=True, **rollout).servers
    assert [(server.index, server.part, server.node) for server in servers] == expected
    assert {server.gpus for server in servers} == {(0, 1)}
    assert {server.num_parts for server in servers} == {max(1, tp // 2)}


def test_wider_engines_beside_ranks_have_the_gpus_and_cores_after_those_of_the_ranks():
    wide = {"placement": "disjoint", "num_nodes": 2, "allow_cross_node": True, "num_engines": 2}
    gpus = plans(2, 4, **wide).servers
    assert [(s.index, s.node, s.gpus) for s in gpus] == [(0, 0, (2, 3)), (0, 1, (2, 3)), (1, 0, (4, 5)), (1, 1, (4, 5))]
    cores = plans(2, 4, on_cpu=True, cores=[range(6), range(10, 16)], **wide).servers
    assert [s.cores for s in cores] == [(2, 3), (12, 13), (4, 5), (14, 15)]


def test_the_parts_of_a_server_come_together_the_first_one_first():
    placement = plans(2, 4, num_nodes=4, allow_cross_node=True)
    assert [[(p.index, p.part) for p in parts] for parts in placement.by_server()] == [
        [(0, 0), (0, 1)],
        [(1, 0), (1, 1)],
    ]
    assert [len(parts) for parts in plans(2, 1, num_nodes=2).by_server()] == [1] * 4


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


def test_a_job_that_was_given_part_of_a_machine_keeps_to_its_part():
    servers = plans(4, 2).servers
    assert [on_host(server, ["4", "5", "6", "7"]).gpus for server in servers] == [("4", "5"), ("6", "7")]
    assert [on_host(server, ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]).gpus for server in servers][1] == ("GPU-c", "GPU-d")
    assert [on_host(server, []) for server in servers] == list(servers)
    on_cpu = plans(2, 1, on_cpu=True).servers[0]
    assert on_host(on_cpu, ["3"]).gpus == ()


@pytest.mark.parametrize(
    ("num_gpus", "tp", "engines", "expected"),
    [(1, 1, 1, [(1,)]), (4, 1, 4, [(4,), (5,), (6,), (7,)]), (4, 2, 2, [(4, 5), (6, 7)]), (6, 2, 1, [(6, 7)])],
)
def test_disjoint_engines_come_after_the_ranks(num_gpus, tp, engines, expected):
    placement = plans(num_gpus, tp, placement="disjoint", num_engines=engines)
    assert [server.gpus for server in placement.servers] == expected
    assert placement.num_ranks == num_gpus and placement.rank_cores == ()


def test_disjoint_engines_have_their_own_gpus_whatever_a_launcher_shows_the_ranks():
    (server,) = plans(2, 2, placement="disjoint", num_engines=1).servers
    assert on_host(server, []).gpus == (2, 3)
    assert on_host(server, ["0", "1"]).gpus == ("2", "3")  # deepspeed --num_gpus 2 shows ranks theirs alone
    assert on_host(server, ["4", "5", "6", "7"]).gpus == ("6", "7")  # a part of a machine
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=4,5"):
        on_host(server, ["4", "5"])


def test_on_cpu_every_rank_and_worker_has_cores_of_its_own():
    placement = plans(2, 2, on_cpu=True, placement="disjoint", num_engines=2, cores=[tuple(range(10, 23))])
    assert placement.rank_cores == ((10, 11), (12, 13))
    assert [server.cores for server in placement.servers] == [(14, 15, 16, 17), (18, 19, 20, 21)]
    assert [server.gpus for server in placement.servers] == [(), ()]


def test_too_few_cores_are_a_problem_and_colocated_processes_share_them():
    with pytest.raises(ConfigError, match=r"2 rank\(s\) and 1 server worker\(s\) of machine 0 on 2 core\(s\)"):
        plans(2, 1, on_cpu=True, placement="disjoint", num_engines=1, cores=[(0, 1)])
    placement = plans(2, 1, on_cpu=True, cores=[(0, 1)])
    assert placement.rank_cores == () and {server.cores for server in placement.servers} == {()}


def test_on_several_machines_each_shares_out_its_own():
    gpus = plans(2, 1, num_nodes=2, placement="disjoint", num_engines=3).servers
    assert [(server.node, server.gpus) for server in gpus] == [(0, (2,)), (0, (3,)), (1, (2,))]
    cores = [(0, 1, 2, 3), (4, 5, 6, 7, 8, 9)]
    placement = plans(2, 1, on_cpu=True, num_nodes=2, placement="disjoint", num_engines=3, cores=cores)
    assert placement.rank_cores == ((0,), (1,), (4, 5), (6, 7))
    assert [server.cores for server in placement.servers] == [(2,), (3,), (8, 9)]


def test_machines_for_engines_alone_have_them_from_gpu_0_and_no_rank():
    placement = plans(4, 2, num_nodes=2, placement="disjoint", nnodes=2, num_engines=3)
    assert [(server.node, server.gpus) for server in placement.servers] == [(2, (0, 1)), (2, (2, 3)), (3, (0, 1))]
    assert placement.num_ranks == 8


def test_on_cpu_each_kind_of_machine_shares_out_its_own_cores():
    cores = [(0, 1), (2, 3, 4, 5), (6, 7, 8)]
    placement = plans(2, 1, on_cpu=True, placement="disjoint", nnodes=2, num_engines=3, cores=cores)
    assert placement.rank_cores == ((0,), (1,))
    assert [(server.node, server.cores) for server in placement.servers] == [(1, (2, 3)), (1, (4, 5)), (2, (6, 7, 8))]


def test_reward_servers_stay_with_the_ranks():
    placement = served(4, 2, placement="disjoint", nnodes=1, num_engines=2)
    assert [(s.node, s.gpus) for s in placement.servers] == [(1, (0, 1)), (1, (2, 3))]
    assert [(s.node, s.gpus) for s in placement.reward_servers] == [(0, (4,)), (0, (5,))]


def served(*words, **options):
    return plans(*words, reward_model={"num_engines": 2, "tensor_model_parallel_size": 1}, **options)


def test_colocated_reward_servers_share_the_first_gpus_of_every_machine():
    placement = served(4, 2, num_nodes=2)
    assert [(s.node, s.gpus, s.kind) for s in placement.reward_servers] == [
        (0, (0,), "reward_server"),
        (1, (0,), "reward_server"),
    ]
    assert {s.model_path for s in placement.reward_servers} == {"models/rm"}
    assert {s.kind for s in placement.servers} == {"engine"}


def test_disjoint_reward_servers_come_after_the_engines():
    placement = served(4, 2, placement="disjoint", num_engines=2)
    assert [s.gpus for s in placement.servers] == [(4, 5), (6, 7)]
    assert [s.gpus for s in placement.reward_servers] == [(8,), (9,)]


def test_disjoint_on_cpu_every_reward_server_has_cores_of_its_own():
    placement = served(2, 1, on_cpu=True, placement="disjoint", num_engines=1, cores=[tuple(range(10))])
    assert placement.rank_cores == ((0, 1), (2, 3))
    assert [s.cores for s in (*placement.servers, *placement.reward_servers)] == [(4, 5), (6, 7), (8, 9)]


def test_without_a_served_reward_model_there_are_no_reward_servers():
    assert plans(2, 1).reward_servers == ()
