"""A reward model with an SGLang server of its own: the same rewards, ReMax and dynamic sampling, a lost server."""

import os
import signal

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]
OWN = [
    "reward_model.enable=true",
    "reward_model.model.dtype=float32",
    "reward_model.normalize=true",
    "reward_model.clip=2.0",
    "reward_model.rule_coef=0.5",
    "trainer.device=cpu",
    "trainer.val_before_train=false",
]
SERVED = ["reward_model.strategy=sglang", "reward_model.rollout.max_num_batched_tokens=512"]
COMPARED = ("reward_model/", "actor/", "rollout/reward")


def computed(job) -> list[dict[str, float]]:
    return [{k: v for k, v in job.steps()[step].items() if k.startswith(COMPARED)} for step in (1, 2)]


def test_a_served_reward_model_trains_like_one_on_the_ranks(start, tmp_path, reward_checkpoint):
    words = [*OWN, f"reward_model.model.path={reward_checkpoint}", "trainer.total_training_steps=2"]

    def finished(name, *more):
        job = start(tmp_path / name, *words, *more)
        assert job.wait() == 0, job.output()
        job.assert_nothing_left()
        return job

    on_ranks, served = finished("ranks"), finished("served", *SERVED)
    first = computed(on_ranks)[0]
    assert first["reward_model/score_square_mean"] > first["reward_model/score_mean"] ** 2 + 0.1  # scores differ
    for before, now in zip(computed(on_ranks), computed(served), strict=True):
        happened = {"reward_model/restarts": 0, "reward_model/out_s": 0}  # what only servers can tell of
        assert now == pytest.approx(before | happened, abs=1e-3)
    assert [any("eval/rm_score_mean" in record for record in job.metrics()) for job in (on_ranks, served)] == [0, 1]
    assert (served.run_dir / "logs" / "reward_server_0.log").is_file()


def test_remax_and_dynamic_sampling_use_its_scores_and_a_lost_server_comes_back(start, tmp_path, reward_checkpoint):
    job = start(
        tmp_path / "run",
        *OWN,
        *SERVED,
        f"reward_model.model.path={reward_checkpoint}",
        "algorithm.adv_estimator=remax",
        "algorithm.filter_groups.enable=true",
        "trainer.total_training_steps=4",
    )
    job.wait_for_step(1)
    os.kill(job.titled(rf"sglang.launch_server.*--model-path.{reward_checkpoint}"), signal.SIGKILL)
    assert job.wait() == 0, job.output()
    job.assert_nothing_left()
    assert "SGLang reward server 0: was killed by SIGKILL; restart 1 of 3" in job.output()
    assert "SGLang reward server 0: answers again after restart 1" in job.output()
    steps = job.steps()
    assert sum(step["reward_model/restarts"] for step in steps.values()) == 1
    for step in steps.values():
        assert step["rollout/num_gen_batches"] >= 1 and step["rollout/greedy_reward_mean"] >= 0
