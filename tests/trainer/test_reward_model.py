"""A reward model in the loop: its scores become rewards, on any number of ranks, and are remembered."""

import threading

import pytest
import torch
from test_trainer import SHARE, trainer

from rlhf_mp.config.reward_model import RewardModelConfig
from rlhf_mp.data.collate import collate
from rlhf_mp.data.types import Trajectory
from rlhf_mp.trainer.reward_model import RewardModel, RunningMoments, SampledScores


class Scorer:
    """A sequence's first token is its score."""

    def score(self, micro_batches):
        return [batch.tokens[:, 0].float() for batch in micro_batches]


def batch_of(scores, rule=None):
    rule = rule or [0.0] * len(scores)
    rows = zip(scores, rule, strict=True)
    return collate([Trajectory([s], [1, 1], [0.0] * 2, [True] * 2, r, i, 0, "stop") for i, (s, r) in enumerate(rows)])


def model(sum_over_ranks=lambda x: x, **knobs) -> RewardModel:
    return RewardModel(Scorer(), RewardModelConfig(enable=True, **knobs), sum_over_ranks)


def means(metrics):
    return {name: total / count for name, (total, count) in metrics.items()}


def test_scores_replace_the_rule_reward_unless_it_has_a_weight():
    batch = batch_of([4, 2, 6], rule=[1.0, 0.0, 1.0])
    rewards, metrics = model().rewards(batch, [[2], [], [0, 1]])
    assert rewards.tolist() == [4.0, 2.0, 6.0] and rewards.dtype == torch.float32
    assert means(metrics) == {
        "score_mean": 4.0, "score_square_mean": pytest.approx(56 / 3), "clipped_fraction": 0.0, "reward_mean": 4.0,
    }  # fmt: skip
    assert model(coef=0.5, rule_coef=10.0).rewards(batch, [[0, 1, 2]])[0].tolist() == [12.0, 1.0, 13.0]


def test_what_an_environment_paid_keeps_the_weight_of_the_rule():
    batch = batch_of([4, 2])
    batch.paid = torch.tensor([[0, 0.5, 0], [0, 0, 1.0]])
    assert model(rule_coef=10.0).paid(batch).tolist() == [[0, 5, 0], [0, 0, 10]]


def test_normalised_by_everything_seen_and_then_clipped():
    own = model(normalize=True, clip=1.0)
    # mean 2, variance (1 + 1) / 2 = 1
    assert own.rewards(batch_of([1, 3]), [[0, 1]])[0].tolist() == [-1.0, 1.0]
    # 1, 3, 8 and 8: mean 5, variance (16 + 4 + 9 + 9) / 4 = 9.5; (8 - 5) / 3.08 = 0.97
    rewards, metrics = own.rewards(batch_of([8, 8]), [[0, 1]])
    assert rewards.tolist() == pytest.approx([3 / 9.5**0.5] * 2)
    assert means(metrics)["clipped_fraction"] == 0
    # far away: clipped
    rewards, metrics = own.rewards(batch_of([100, 5]), [[0, 1]])
    assert rewards[0] == 1.0 and means(metrics)["clipped_fraction"] == 0.5


def test_equal_scores_are_no_nan():
    assert model(normalize=True).rewards(batch_of([7, 7]), [[0, 1]])[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("seed", range(3))
def test_moments_are_those_of_all_values_however_they_came(seed):
    values = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 3 + 100
    moments = RunningMoments()
    for part in values.split([1, 30, 19]):
        moments.add(len(part), part.mean().item(), (part - part.mean()).square().sum().item())
    assert moments.mean == pytest.approx(values.mean().item())
    assert moments.std == pytest.approx(values.std(correction=0).item())


def test_ranks_learn_the_same_moments_and_a_copy_counts_nothing():
    """Two ranks with rows of their own and a third that repeats the second's, as a part of the same model."""
    shares, barrier, given, found = [[1, 2], [9], [9]], threading.Barrier(3), {}, {}

    def run(rank):
        def sum_over_ranks(tensor):
            given[rank] = tensor
            barrier.wait()
            total = sum(given[r] for r in range(2))
            barrier.wait()
            return total

        own = model(sum_over_ranks, normalize=True)
        own.rewards(batch_of(shares[rank]), [list(range(len(shares[rank])))])
        found[rank] = own.state_dict()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # 1, 2 and 9: mean 4, squares 9 + 4 + 25
    assert found == {rank: {"count": 3.0, "mean": 4.0, "squares": 38.0} for rank in range(3)}


def test_a_resumed_run_normalises_as_it_would_have():
    straight, resumed = model(normalize=True), model(normalize=True)
    straight.rewards(batch_of([1, 3, 8]), [[0, 1, 2]])
    resumed.load_state_dict(straight.state_dict())
    batch = batch_of([2, 4])
    assert torch.equal(resumed.rewards(batch, [[0, 1]])[0], straight.rewards(batch, [[0, 1]])[0])


def test_a_reward_models_rewards_are_what_advantages_come_from_and_what_it_has_seen_is_saved():
    class RewardModel:
        def rewards(self, batch, cut):
            assert cut == SHARE.score_rows and batch.rewards.tolist() == [1.0, 0.0, 0.0, 1.0]
            return 10 * batch.rewards + 1, {"reward_mean": (24.0, 4)}

        def state_dict(self):
            return {"count": 4}

        def load_state_dict(self, state):
            self.loaded = state

    made = trainer(1, [], reward_model=RewardModel())
    made.rollouts.state_dict = lambda step: {"batch": step}
    made.rollouts.load_state_dict = lambda state: None
    made.train()
    assert made.state_dict() == {"data": {"batch": 1}, "algorithm": {}, "reward_model": {"count": 4}}
    made.load_state_dict(made.state_dict())
    assert made.reward_model.loaded == {"count": 4}
    (first, _), _ = made.actor.batches
    assert first[0].rewards.tolist() == [1.0, 11.0] and first[0].advantages.max() == 11.0
    ((_, metrics), _) = made.log.sinks[0].written
    assert metrics["reward_model/reward_mean"] == 6.0


def sampled(scores, greedy):
    """Responses that came with their scores, and those of the greedy response; rule rewards 1 and 0.5."""
    return collate(
        [
            Trajectory([9], [1], [0.0], [True], 1.0, 0, 0, "stop", 0.5, rm_score=score, baseline_rm_score=base)
            for score, base in zip(scores, greedy, strict=True)
        ]
    )


def test_scores_that_came_with_the_responses_are_used_as_those_of_the_ranks_are():
    knobs = {"normalize": True, "clip": 1.2, "rule_coef": 0.25, "coef": 2.0}
    on_ranks, served = model(**knobs), RewardModel(SampledScores(), RewardModelConfig(**knobs), lambda x: x)
    given = batch_of([1, 3, 8], rule=[1.0] * 3), sampled([1.0, 3.0, 8.0], [0.0] * 3)
    cut = [[2, 0], [], [1]]
    (expected, said), (found, says) = (m.rewards(b, cut) for m, b in zip((on_ranks, served), given, strict=True))
    assert torch.equal(found, expected) and says == said
    assert served.state_dict() == on_ranks.state_dict()


def test_a_greedy_responses_reward_is_shaped_like_the_others_and_teaches_nothing():
    own = RewardModel(SampledScores(), RewardModelConfig(normalize=True, clip=1.5, rule_coef=4.0), lambda x: x)
    batch = sampled([1.0, 3.0], [2.0, 11.0])
    own.rewards(batch, [[0, 1]])
    before = own.state_dict()
    # mean 2, standard deviation 1: (2 - 2) / 1 = 0, (11 - 2) / 1 = 9, clipped to 1.5; and 4 x 0.5 of the rule
    assert own.baselines(batch).tolist() == [2.0, 3.5]
    assert own.state_dict() == before


def test_only_baselines_that_were_scored_are_replaced():
    batch = batch_of([1, 2])
    assert batch.rm_scores is None and batch.baseline_rm_scores is None
    assert sampled([1.0, 2.0], [3.0, 4.0]).baseline_rm_scores.tolist() == [3.0, 4.0]
