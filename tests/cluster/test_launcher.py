"""The same rank from every launcher's variables."""

import os
from unittest.mock import patch

import pytest

from rlhf_mp.cluster.launcher import RankInfo, first_host, leave_out, rank_environment, read_rank, tasks_per_node
from rlhf_mp.errors import ConfigError

DEEPSPEED = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
TORCHRUN = {("LOCAL_WORLD_SIZE" if name == "LOCAL_SIZE" else name): value for name, value in DEEPSPEED.items()}
SRUN = {
    "SLURM_JOB_ID": "123456",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
SBATCH_SCRIPT = {"SLURM_JOB_ID": "123456", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "7"}


@pytest.fixture
def environ():
    """Start with the given variables as the whole environment; afterwards it is as before, what was added is gone."""

    def become(variables):
        os.environ.clear()
        os.environ.update(variables)
        return os.environ

    with patch.dict(os.environ):
        yield become


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (DEEPSPEED, RankInfo(5, 1, 8, 4)),
        (TORCHRUN, RankInfo(5, 1, 8, 4)),
        (SRUN, RankInfo(5, 1, 7, 3)),
        (SRUN | DEEPSPEED, RankInfo(5, 1, 8, 4)),  # deepspeed --no_ssh under srun: the inner launcher counts
        (SBATCH_SCRIPT, RankInfo(0, 0, 1, 1)),  # the script itself is one process, whatever it will start
        ({}, RankInfo(0, 0, 1, 1)),
    ],
    ids=["deepspeed", "torchrun", "srun", "deepspeed under srun", "sbatch", "python"],
)
def test_a_rank_is_read_from_its_launchers_variables(variables, expected):
    assert read_rank(variables) == expected


def test_half_of_a_launchers_variables_is_an_error_that_names_the_rest():
    with pytest.raises(ConfigError) as error:
        read_rank({"RANK": "0", "WORLD_SIZE": "2"})
    assert [p.key for p in error.value.problems] == ["LOCAL_RANK", "LOCAL_WORLD_SIZE"]


def test_a_single_process_gets_a_complete_environment_and_a_free_port(environ):
    variables = environ({})
    assert rank_environment() == RankInfo(0, 0, 1, 1)
    assert (variables["RANK"], variables["WORLD_SIZE"], variables["LOCAL_RANK"]) == ("0", "1", "0")
    assert variables["MASTER_ADDR"] == "127.0.0.1"
    assert 1024 < int(variables["MASTER_PORT"]) < 65536
    assert int(variables["OMP_NUM_THREADS"]) == len(os.sched_getaffinity(0))


def test_what_a_launcher_set_is_left_alone(environ):
    before = DEEPSPEED | {"OMP_NUM_THREADS": "7"}
    variables = environ(before)
    rank_environment()
    assert {name: variables[name] for name in before} == before


def test_ranks_of_one_machine_share_its_cores(environ, monkeypatch):
    variables = environ(DEEPSPEED)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(13))
    rank_environment()
    assert variables["OMP_NUM_THREADS"] == "3"  # 13 cores, 4 ranks
    del variables["OMP_NUM_THREADS"]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(2))
    rank_environment()
    assert variables["OMP_NUM_THREADS"] == "1"


def test_srun_ranks_meet_on_the_first_machine(environ):
    meeting = []
    for rank in ("0", "6"):
        variables = environ(SRUN | {"SLURM_PROCID": rank})
        rank_environment()
        meeting.append((variables["MASTER_ADDR"], variables["MASTER_PORT"]))
    assert meeting == [("gpu07", "13456")] * 2  # 10000 + job id mod 10000
    assert (variables["RANK"], variables["WORLD_SIZE"], variables["LOCAL_RANK"]) == ("6", "7", "1")


def test_several_ranks_without_a_meeting_point_is_an_error(environ):
    environ({name: value for name, value in DEEPSPEED.items() if not name.startswith("MASTER")})
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        rank_environment()


@pytest.mark.parametrize(("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("4,3", [4, 3])])
def test_slurms_task_counts(text, counts):
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[03-05,9],cpu1", "gpu03"),
        ("rack-a[7]-ib,x", "rack-a7-ib"),
        ("a.b.example", "a.b.example"),
    ],
)
def test_the_first_host_of_a_compressed_list(nodelist, host):
    assert first_host(nodelist) == host


def test_the_last_machines_may_be_left_out_of_the_ranks(environ):
    """Eight processes on four machines; the last two have engines and no ranks."""
    launched = [
        {**TORCHRUN, "RANK": str(rank), "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"} for rank in range(8)
    ]
    found = []
    for variables in launched:
        there = environ(variables)
        found.append(leave_out(rank_environment(), engine_machines=2))
        assert there["WORLD_SIZE"] == "4"
    assert [info.trains for info in found] == [True] * 4 + [False] * 4
    assert {(info.world_size, info.engine_machines) for info in found} == {(4, 2)}


def test_one_machine_of_ranks_and_one_of_engines_are_several(environ):
    environ({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"})
    info = rank_environment()
    assert leave_out(info, engine_machines=0) == info
    alone = leave_out(info, engine_machines=1)
    assert alone.world_size == alone.local_world_size == 4 and alone.several_hosts
