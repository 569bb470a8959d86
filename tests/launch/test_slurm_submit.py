"""What submit.py asks Slurm for, and what a node's check says. No Slurm here: tests/slurm has a real one."""

import runpy
from pathlib import Path

import pytest

from rlhf_mp.config.allocation import read_allocated
from rlhf_mp.config.load import load_config
from rlhf_mp.errors import ConfigError
from rlhf_mp.planner.amount import GIB
from rlhf_mp.planner.hardware import find_gpu
from rlhf_mp.planner.preflight import Machine, plan_of

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "grpo_qwen2.5_7b_deepspeed.yaml"
SUBMIT = runpy.run_path(str(ROOT / "launch" / "slurm" / "submit.py"))
CHECK = runpy.run_path(str(ROOT / "launch" / "slurm" / "check.py"))


def command(*words: str) -> dict[str, str]:
    """sbatch's options as they would be given, and what follows the script's name."""
    args = SUBMIT["parse_args"](["--config", str(CONFIG), *words])
    config = SUBMIT["checked_config"](args)
    parts = SUBMIT["sbatch_command"](config, args)
    script = parts.index("launch/slurm/train.sbatch")
    options = dict(part.partition("=")[::2] for part in parts[1:script])
    return options | {"rest": " ".join(parts[script + 1 :])}


def test_nodes_tasks_and_gpus_follow_the_config_and_its_overrides():
    asked = command("trainer.n_gpus_per_node=4", "trainer.nnodes=1", "--nodes", "2")
    assert (asked["--nodes"], asked["--ntasks-per-node"], asked["--gpus-per-node"]) == ("2", "4", "4")
    assert asked["rest"] == f"--config {CONFIG} trainer.n_gpus_per_node=4 trainer.nnodes=1"  # the allocation decides


ENGINES_ALONE = ["trainer.placement=disjoint", "actor_rollout_ref.rollout.nnodes=1"]


def test_nodes_for_engines_alone_are_asked_for_too():
    assert command("trainer.nnodes=1", *ENGINES_ALONE)["--nodes"] == "2"
    asked = command("--nodes", "3", *ENGINES_ALONE)
    assert (asked["--nodes"], asked["--ntasks-per-node"], asked["--gpus-per-node"]) == ("3", "8", "8")


def test_ranks_have_the_nodes_that_engines_leave(capsys):
    config = read_allocated(CONFIG, ENGINES_ALONE, 3)[0]
    assert config.trainer.nnodes == 2 and config.actor_rollout_ref.rollout.num_engines == 4  # of 2 GPUs
    assert SUBMIT["main"](["--config", str(CONFIG), "--nodes", "1", "--dry-run", *ENGINES_ALONE]) == 2
    assert "the job has 1 machine(s), and none is left for ranks" in capsys.readouterr().err


def test_memory_is_the_plans_with_room_and_shrinks_with_more_nodes():
    def asked(nodes: int) -> int:
        return int(command("--nodes", str(nodes))["--mem"].removesuffix("G"))

    config = load_config(CONFIG, ["trainer.nnodes=2"])
    planned = plan_of(config, Machine(find_gpu("h100"), None)).host_per_node / GIB
    assert planned < asked(2) <= planned * 1.25 + 1
    assert asked(8) < asked(2)  # the optimizer's share of every node


def test_time_follows_the_estimate_between_half_an_hour_and_a_day():
    def asked(steps: int) -> int:
        hours, minutes, _ = map(int, command(f"trainer.total_training_steps={steps}")["--time"].split(":"))
        return 60 * hours + minutes

    assert asked(1) == 30
    assert asked(10**6) == 24 * 60
    assert 30 < asked(20) < asked(40) < 24 * 60


def test_a_card_that_is_too_small_is_refused(capsys):
    words = ["--config", str(CONFIG), "--gpu", "t4", "--dry-run"]
    assert SUBMIT["main"](words) == 2
    assert "trainer.skip_plan=true" in capsys.readouterr().err


def test_no_gpus_are_asked_for_on_cpu():
    asked = command("trainer.device=cpu", "--cpus-per-task", "3")
    assert "--gpus-per-node" not in asked
    assert asked["--cpus-per-task"] == "3"


DISJOINT = ["trainer.placement=disjoint", "trainer.nnodes=1", "trainer.n_gpus_per_node=2"]
ENGINES = "actor_rollout_ref.rollout"


def test_engines_of_their_own_have_gpus_beside_the_ranks():
    servers = [f"{ENGINES}.num_engines=3", f"{ENGINES}.tensor_model_parallel_size=2"]
    asked = command(*DISJOINT, *servers, "trainer.skip_plan=true")
    assert (asked["--ntasks-per-node"], asked["--gpus-per-node"]) == ("2", "8")


def test_engines_of_their_own_have_cores_beside_the_ranks():
    servers = [f"{ENGINES}.num_engines=3", f"{ENGINES}.tensor_model_parallel_size=1"]
    asked = command(*DISJOINT, *servers, "trainer.device=cpu", "trainer.skip_plan=true")
    assert (asked["--ntasks-per-node"], asked["--cpus-per-task"]) == ("2", "3")  # 2 ranks and 3 engines on 6 cores


def test_options_of_slurm_are_passed_on():
    asked = command("--sbatch=--qos=long", "--sbatch=--exclusive", "--singleton", "--name", "x", "--time", "1:00:00")
    assert asked["--qos"] == "long" and "--exclusive" in asked
    assert (asked["--dependency"], asked["--job-name"], asked["--time"]) == ("singleton", "x", "1:00:00")


def test_a_dry_run_prints_the_command_and_submits_nothing(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")  # no sbatch here
    assert SUBMIT["main"](["--config", str(CONFIG), "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("sbatch --parsable --job-name=")


def test_a_config_with_problems_is_not_submitted(capsys):
    assert SUBMIT["main"](["--config", str(CONFIG), "trainer.save_freq=0"]) == 2
    assert "trainer.save_freq = 0" in capsys.readouterr().err


@pytest.mark.parametrize(("tasks", "sound"), [([8, 8], True), ([8, 7], False), ([1, 1], False)])
def test_an_allocation_with_other_tasks_than_ranks_is_a_problem(tasks, sound):
    problems = list(CHECK["task_problems"](load_config(CONFIG), tasks))
    assert (problems == []) == sound
    if not sound:
        assert f"sbatch --ntasks-per-node=8, or trainer.n_gpus_per_node={tasks[0]}" == problems[0].fix


def test_a_node_reports_files_and_allocation_together():
    with pytest.raises(ConfigError) as error:
        CHECK["checked_config"](CONFIG, ["data.train_files=nowhere.jsonl"], [4])
    keys = {problem.key for problem in error.value.problems}
    assert {"data.train_files", "trainer.n_gpus_per_node"} <= keys
