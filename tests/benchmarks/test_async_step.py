"""Medians of a run's steps, by hand."""

import pytest

from benchmarks.async_step import medians, table


def step(total: float, sampling: float, train: float) -> dict[str, float]:
    return {
        "time/step_s": total,
        "queue/sampling_s": sampling,
        "time/score_s": 0.5,
        "time/train_s": train - 0.5,
        "time/sync_s": 0.1,
        "queue/ranks_waited_s": 0.2,
        "queue/engines_idle_s": 0.3,
        "rollout/token_staleness_mean": total / 10,
    }


def test_a_step_is_compared_with_the_longer_of_its_own_halves():
    found = medians([step(2.0, 1.0, 1.6), step(3.0, 2.5, 1.0), step(1.0, 0.5, 1.0)])
    # 2 / 1.6 = 1.25, 3 / 2.5 = 1.2, 1 / 1 = 1
    assert found["ratio"] == pytest.approx(1.2)
    assert (found["step"], found["sampling"], found["train"]) == (2.0, 1.0, 1.0)
    assert (found["swap"], found["waited"], found["idle"], found["steps"]) == (0.1, 0.2, 0.3, 3)
    assert found["token_staleness"] == pytest.approx(0.2)
    shown = table([{"max_staleness": 1} | found]).terminal()
    assert "max_staleness" in shown and "1.2" in shown
