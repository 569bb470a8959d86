"""Ages of tokens, by hand."""

from rlhf_mp.cluster.staleness import staleness_metrics
from rlhf_mp.data.types import Trajectory


def response(versions: list[int], mask: list[bool]) -> Trajectory:
    count = len(mask)
    version = min(versions, default=4)
    return Trajectory([1], [2] * count, [0.0] * count, mask, 0.0, 0, version, "stop", token_versions=versions)


def test_ages_are_of_the_tokens_that_the_policy_chose():
    responses = [
        response([2, 2, 3], [True, False, True]),  # trained on at step 5: 3 and 2 versions old
        response([4, 4], [True, True]),  # 1 and 1
        response([], [True]),  # all of them version 4: 1
    ]
    assert staleness_metrics(responses, step=5) == {
        "rollout/token_staleness_mean": (3 + 2 + 1 + 1 + 1, 5),
        "rollout/token_staleness_max": (3, 1),
        "rollout/mixed_versions_fraction": (1, 3),
    }
