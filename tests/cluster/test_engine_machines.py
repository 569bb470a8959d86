"""Rank 0 and the keepers of machines with engines alone, at a real store. Ray and the engines: tests/slurm."""

import json
import os
import threading
import time
from dataclasses import asdict
from datetime import timedelta

import pytest
import torch.distributed as dist

from rlhf_mp.cluster import bootstrap, engine_machines
from rlhf_mp.cluster.engine_machines import EngineMachines, Machine, keep_machine, open_store
from rlhf_mp.cluster.launcher import RankInfo
from rlhf_mp.errors import ConfigError
from rlhf_mp.rollout.sglang_server import free_port

RANK_0 = RankInfo(rank=0, local_rank=0, world_size=1, local_world_size=1, engine_machines=2)
KEEPERS = [RankInfo(rank=rank, local_rank=0, world_size=1, local_world_size=1, engine_machines=2) for rank in (1, 2)]


@pytest.fixture(autouse=True)
def meeting_point(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))


def test_a_machine_that_does_not_come_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_machines, "MEET_S", 2)
    here = open_store(RANK_0)
    here.set("here/0", json.dumps(asdict(Machine("n2", "10.0.0.2", [], [0, 1], sees_run_dir=True))))
    with pytest.raises(ConfigError, match=r"rollout\.nnodes = 2: machine 1 of them did not come within 2 s"):
        EngineMachines(RANK_0, tmp_path)


def test_one_that_does_not_see_the_run_directory_is_named(tmp_path):
    here = open_store(RANK_0)
    for index, sees in enumerate((True, False)):
        here.set(f"here/{index}", json.dumps(asdict(Machine(f"n{index}", "10.0.0.2", [], [0], sees))))
    with pytest.raises(ConfigError, match="does not appear on n1"):
        EngineMachines(RANK_0, tmp_path)
    assert list(tmp_path.iterdir()) == []


class Node:
    """In place of Ray's process on a machine."""

    returncode = 7

    def __init__(self, ended: bool):
        self.poll = lambda: 7 if ended else None


@pytest.fixture
def keepers(tmp_path, monkeypatch):
    """Two, each in a thread; what they told Ray, and what ended them."""
    joined, errors = [], []
    monkeypatch.setattr(bootstrap, "authenticate", lambda token: joined.append(token))
    monkeypatch.setattr(bootstrap, "start_node", lambda head, *_: (joined.append(head), Node("dying" in head))[1])
    monkeypatch.setattr(bootstrap, "stop_node", lambda node: joined.append("left"))
    monkeypatch.setattr(engine_machines, "LOOK_S", 0.05)

    def keep(info):
        try:
            keep_machine(info, f"10.0.0.{info.rank}", tmp_path, tmp_path)
        except RuntimeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=keep, args=(info,)) for info in KEEPERS]
    for thread in threads:
        thread.start()
    yield joined, errors
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_keepers_join_stay_and_leave_when_told_to(tmp_path, keepers):
    joined, errors = keepers
    machines = EngineMachines(RANK_0, tmp_path)
    assert [machine.address for machine in machines.machines] == ["10.0.0.1", "10.0.0.2"]
    assert {tuple(machine.cores) for machine in machines.machines} == {tuple(sorted(os.sched_getaffinity(0)))}
    assert joined == []
    machines.invite("secret", "head:1")
    assert sorted(joined) == ["head:1", "head:1", "secret", "secret"]
    assert b"secret" not in open_store(RANK_0).get("ray")
    time.sleep(0.3)
    assert "left" not in joined
    machines.dismiss()
    assert joined[4:] == ["left", "left"] and errors == []
    assert list(tmp_path.iterdir()) == []


def test_a_keeper_says_that_ray_has_ended(tmp_path, keepers):
    machines = EngineMachines(RANK_0, tmp_path)  # the store is its, and ends with it
    machines.invite("secret", "dying:1")
    deadline = time.monotonic() + 10
    while len(keepers[1]) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert keepers[1] == ["Ray on this machine ended with exit code 7"] * 2


def test_it_is_not_in_the_way_of_the_ranks_own_store(tmp_path):
    ranks = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 1, True, timedelta(seconds=5), multi_tenant=True)
    ours = open_store(RANK_0)
    ours.set("ray", "ours")
    ranks.set("ray", "theirs")
    assert ours.get("ray") == b"ours" and ranks.get("ray") == b"theirs"
