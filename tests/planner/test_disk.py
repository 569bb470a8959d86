"""What checkpoints take, by hand; real ones are weighed in tests/e2e."""

from collections import namedtuple
from pathlib import Path

import pytest

from rlhf_mp.config.load import load_config
from rlhf_mp.planner import disk
from rlhf_mp.planner.amount import GIB
from rlhf_mp.planner.disk import DiskPlan, describe_disk, disk_plan, disk_problems, free_for
from rlhf_mp.planner.preflight import Machine, job_of, plan_problems

CONFIG = Path(__file__).parents[2] / "configs" / "grpo_qwen2.5_7b_deepspeed.yaml"
NUM = 7_615_616_512  # parameters of Qwen2.5-7B, which the planner knows by its name
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
NO_OFFLOAD = (f"{ACTOR}.fsdp_config.param_offload=false", f"{ACTOR}.fsdp_config.optimizer_offload=false")
NO_REF_OFFLOAD = "actor_rollout_ref.ref.fsdp_config.param_offload=false"
MEGATRON = (f"{ACTOR}.strategy=megatron", *NO_OFFLOAD, NO_REF_OFFLOAD)
PPO = ("critic.model.path=models/Qwen2.5-7B-Instruct", "critic.enable=true", "algorithm.adv_estimator=gae")
Usage = namedtuple("Usage", "total used free")


def planned(*overrides: str) -> DiskPlan:
    config = load_config(CONFIG, overrides)
    return disk_plan(config, job_of(config, Machine(None, None)))


@pytest.mark.parametrize(
    ("overrides", "bytes_each"),
    [
        ((), 12),  # ZeRO-3: master weights and both moments, no bfloat16 weights
        ((f"{ACTOR}.deepspeed.zero_stage=2", *NO_OFFLOAD), 14),
        (("trainer.n_gpus_per_node=4",), 12),  # however many share them
        ((f"{ACTOR}.optim.optimizer=sgd",), 8),  # master weights and the momentum
    ],
)
def test_a_checkpoint_has_what_training_goes_on_with(overrides, bytes_each):
    assert planned(*overrides).checkpoint == pytest.approx(bytes_each * NUM, rel=1e-6)


def test_megatrons_layout_does_not_matter_and_in_float32_it_writes_weights_twice():
    layouts = [
        planned(*MEGATRON, f"{ACTOR}.megatron.tensor_model_parallel_size={tp}",
                f"{ACTOR}.megatron.pipeline_model_parallel_size={pp}").checkpoint
        for tp, pp in ((1, 1), (2, 1), (2, 2))
    ]  # fmt: skip
    assert layouts == [pytest.approx(14 * NUM, rel=1e-3)] * 3  # a vocabulary padded to 128
    assert planned(*MEGATRON, f"{MODEL}.dtype=float32").checkpoint == pytest.approx(16 * NUM, rel=1e-3)


def test_a_critic_is_in_checkpoint_and_export():
    alone, both = planned(), planned(*PPO)
    assert both.checkpoint == pytest.approx(2 * alone.checkpoint, rel=0.08)  # without the vocabulary's head
    assert both.export == pytest.approx(2 * alone.export, rel=0.08)


def test_of_lora_the_adapter_alone_is_in_a_checkpoint_and_the_whole_model_exported():
    adapter = planned(f"{MODEL}.lora_rank=16", NO_REF_OFFLOAD)
    assert adapter.checkpoint < 0.02 * planned().checkpoint
    assert adapter.export == 2 * NUM


@pytest.mark.parametrize(
    ("overrides", "at_once"),
    [
        ((), 3),  # two are kept, and stay until the third is whole
        (("trainer.max_actor_ckpt_to_keep=5",), 6),
        (("trainer.save_freq=-1",), 1),
        (("trainer.total_training_steps=40",), 2),  # saved at 20 and 40
        (("trainer.total_training_steps=41",), 3),
        (("trainer.best_metric=eval/accuracy",), 4),
    ],
)
def test_how_many_there_are_at_once(overrides, at_once):
    assert planned(*overrides).at_once == at_once


def test_the_export_may_be_in_every_checkpoint_or_nowhere():
    usual, never, always = (planned(f"trainer.save_hf={when}") for when in ("last", "never", "always"))
    assert (usual.export, never.export) == (2 * NUM, 0)
    assert always.checkpoint == usual.checkpoint + 2 * NUM
    assert usual.total == 3 * usual.checkpoint + usual.export


@pytest.fixture
def room(tmp_path, monkeypatch):
    """A run directory that is still to be made, on a disk with so much room."""

    def has(gib: float):
        monkeypatch.setattr(disk.shutil, "disk_usage", lambda place: Usage(0, 0, int(gib * GIB)))
        config = load_config(CONFIG, [f"trainer.default_local_dir={tmp_path}/new/run"])
        return config, job_of(config, Machine(None, None))

    return has


def test_too_little_room_is_said_with_sizes_and_what_would_fit(room):
    assert list(disk_problems(*room(270))) == []
    (problem,) = disk_problems(*room(260))
    assert problem.key == "trainer.default_local_dir"
    assert "269.5 GiB for 3 checkpoint(s) of 85.1 GiB and the exported model of 14.2 GiB" in problem.reason
    assert "260.0 GiB are free there" in problem.reason
    assert "trainer.max_actor_ckpt_to_keep=1 and trainer.save_hf=never, which take 170.2 GiB" in problem.fix
    (problem,) = disk_problems(*room(100))
    assert "max_actor_ckpt_to_keep" not in problem.fix and "trainer.skip_plan=true" in problem.fix


def test_the_best_checkpoint_stays_beside_the_fewest(room):
    config, job = room(270)
    config.trainer.best_metric = "eval/accuracy"
    (problem,) = disk_problems(config, job)
    assert "which take 255.3 GiB" in problem.fix  # one kept, the best, and the one that is being written


def test_it_is_part_of_the_check_before_a_start_here_and_not_of_one_for_elsewhere(room):
    config, _ = room(1)
    keys = {problem.key for problem in plan_problems(config)}
    assert "trainer.default_local_dir" in keys
    assert "trainer.default_local_dir" not in {p.key for p in plan_problems(config, Machine(None, None))}
    assert describe_disk(*room(1)).endswith("1.0 GiB may be used at " + config.trainer.default_local_dir)


def test_older_checkpoints_of_the_run_make_room(tmp_path, monkeypatch):
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda place: Usage(0, 0, 100))
    assert free_for(tmp_path / "new") == 100
    saved = tmp_path / "new" / "checkpoints" / "global_step_000005" / "actor"
    saved.mkdir(parents=True)
    (saved / "states.pt").write_bytes(bytes(50))
    assert free_for(tmp_path / "new") == 150
