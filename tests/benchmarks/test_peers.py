"""The comparison's arithmetic, and that both sides are asked to do the same."""

from pathlib import Path

import pytest

from benchmarks.peers import summarize, training_steps, where_time_goes
from benchmarks.rlhf_mp_side import VARIANTS as OUR_VARIANTS
from benchmarks.rlhf_mp_side import run_config
from benchmarks.trl_job import TrlJob, grpo_arguments
from benchmarks.trl_side import VARIANTS as TRL_VARIANTS
from benchmarks.workloads import REWARDS, WORKLOADS, Material

MATERIAL = Material(Path("/models/m"), Path("/data/train.jsonl"))


def record(step_s, rollout_s, tokens, reward):
    return {
        "step": 1, "time/step_s": step_s, "time/rollout_s": rollout_s, "time/score_s": 1.0, "time/train_s": 2.0,
        "time/sync_s": 0.5, "rollout/response_tokens": tokens, "rollout/reward_mean": reward,
    }  # fmt: skip


def test_speed_leaves_out_the_first_step_and_phases_add_up():
    found = summarize([record(99, 50, 7, 0.0), record(6, 2, 100, 0.2), record(10, 4, 300, 0.4)])
    assert found["step_median_s"] == found["step_mean_s"] == 8
    assert found["tokens_per_s"] == 400 / 16  # not the mean of 100 / 6 and 300 / 10
    assert found["rollout_tokens_per_s"] == 400 / 6
    assert found["rollout_s"] + found["score_s"] + found["train_s"] + found["sync_s"] + found["other_s"] == 8
    assert found["other_s"] == 8 - 3 - 1 - 2 - 0.5


def test_reward_is_of_all_steps_and_smoothed_at_the_end():
    found = summarize([record(1, 0.1, 1, reward) for reward in (0.0, 0.9, 0.5, 0.5, 0.5, 0.5, 0.5)])
    assert (found["reward_first"], found["reward_last"]) == (0.0, 0.5)


def test_validations_are_not_steps():
    assert training_steps([{"step": 0, "time/eval_s": 3.0}, record(1, 1, 1, 1)]) == [record(1, 1, 1, 1)]


def test_shares_of_a_step_are_ranked():
    summary = {"step_mean_s": 10, "rollout_s": 3, "score_s": 0, "train_s": 6, "sync_s": 0.01, "other_s": 0.99}
    assert where_time_goes(summary) == "train 60%, rollout 30%, other 10%"


JOBS = [job for workload in WORKLOADS.values() for job in (workload, workload.probe())]


@pytest.mark.parametrize("workload", JOBS, ids=lambda w: f"{w.name}-{w.prompts_per_step}")
def test_every_side_cuts_a_step_into_equally_many_optimizer_steps(workload):
    for variant in TRL_VARIANTS[workload.name]:
        settings = grpo_arguments(TrlJob(workload, variant, 3, "model", "prompts", "out"))
        per_pass = settings["per_device_train_batch_size"] * variant.processes
        assert per_pass * settings["gradient_accumulation_steps"] == workload.responses_per_minibatch
        assert per_pass * settings["steps_per_generation"] == workload.responses_per_step
    for variant in OUR_VARIANTS[workload.name]:
        config = run_config(workload, variant, MATERIAL, 3, Path("out"))
        per_update = config["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"] * workload.group_size
        assert per_update == workload.responses_per_minibatch


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=lambda w: w.name)
def test_our_side_is_a_valid_config(workload, tmp_path):
    from omegaconf import OmegaConf

    from rlhf_mp.config.load import load_config

    for variant in OUR_VARIANTS[workload.name]:
        OmegaConf.save(OmegaConf.create(run_config(workload, variant, MATERIAL, 3, tmp_path)), tmp_path / "c.yaml")
        config = load_config(tmp_path / "c.yaml", [])
        assert config.actor_rollout_ref.actor.use_kl_loss == (workload.kl_coef > 0)
        assert config.actor_rollout_ref.rollout.num_engines == variant.num_engines


def test_a_job_survives_its_file(tmp_path):
    workload = WORKLOADS["quickstart"]
    job = TrlJob(workload, TRL_VARIANTS["quickstart"][1], 3, "model", "prompts", "out")
    job.save(tmp_path / "job.json")
    assert TrlJob.load(tmp_path / "job.json") == job


@pytest.mark.parametrize(
    ("response", "reward"),
    [("ba 3 lo 7 mi", 1), ("ba 7 lo 3 mi", 0), ("ba lo", 0), ("", 0), ("7", 1), ("ba 7: lo", 1)],
)
def test_the_last_number_is_what_math_verify_finds(response, reward, math_verify_reward):
    assert REWARDS["math"](response, "7") == reward == math_verify_reward(response)


@pytest.fixture(scope="module")
def math_verify_reward():
    """The reward of the other side, on the same texts."""
    import asyncio

    from rlhf_mp.config.reward import MathTerm
    from rlhf_mp.data.prompts import Prompt
    from rlhf_mp.rewards.base import Response, Setting
    from rlhf_mp.rewards.math import MathReward

    judge = MathReward(MathTerm("math"), Setting())
    prompt = Prompt(index=0, ids=[1], text="", answer="7")
    yield lambda response: asyncio.run(judge.score(prompt, [Response(response)]))[0]
    asyncio.run(judge.close())
