"""What a validation says: each file by itself and all together."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from rlhf_mp.data.types import Sums

SOLVED = 1.0
"""A reward of at least this counts as solved."""


@dataclass(frozen=True)
class Judged:
    """A response as validation sees it."""

    reward: float
    num_tokens: int
    vote: str  # the answer it gives; equal answers vote together
    rm_score: float | None = None  # the reward model's, where it is served by SGLang

    @property
    def solved(self) -> bool:
        return self.reward >= SOLVED


def validation_metrics(files: Mapping[str, Sequence[Sequence[Judged]]]) -> Sums:
    """``accuracy`` and the others over the prompts of all files; with several, ``<file>/accuracy`` of each too.

    Args:
        files: groups of responses, one group a prompt, by the file's name.
    """
    metrics = group_metrics([group for groups in files.values() for group in groups])
    if len(files) > 1:
        for name, groups in files.items():
            metrics |= {f"{name}/{metric}": pair for metric, pair in group_metrics(groups).items()}
    return metrics


def group_metrics(groups: Sequence[Sequence[Judged]]) -> Sums:
    """Of one response to a prompt: how often it is right, and its reward; the mean score of a served reward model.

    Of n responses also, for each prompt:

    pass@k: the chance that one of k responses is right, for k of 2, 4, 8, ... and n; accuracy is pass@1.
    mean@n: their mean reward.
    maj@n: whether the answer that most of them give is right.
    """
    responses = [response for group in groups for response in group]
    metrics: Sums = {
        "accuracy": (sum(r.solved for r in responses), len(responses)),
        "reward_mean": (sum(r.reward for r in responses), len(responses)),
        "response_length_mean": (sum(r.num_tokens for r in responses), len(responses)),
    }
    rm_scores = [r.rm_score for r in responses if r.rm_score is not None]
    if rm_scores:
        metrics["rm_score_mean"] = (sum(rm_scores), len(rm_scores))
    n = min(map(len, groups), default=0)
    if n > 1:
        for k in [*(2**i for i in range(1, n.bit_length()) if 2**i < n), n]:
            estimates = [pass_at_k(len(group), sum(r.solved for r in group), k) for group in groups]
            metrics[f"pass@{k}"] = (sum(estimates), len(groups))
        metrics[f"mean@{n}"] = (sum(sum(r.reward for r in group) / len(group) for group in groups), len(groups))
        metrics[f"maj@{n}"] = (sum(map(majority_solved, groups)), len(groups))
    return metrics


def pass_at_k(num_responses: int, num_solved: int, k: int) -> float:
    """The chance that k of the responses, drawn without replacement, hold a right one; unbiased in the responses.

    Source: arXiv:2107.03374 eq. 1, 1 - C(n - c, k) / C(n, k), as a product that never overflows.
    """
    wrong = num_responses - num_solved
    if wrong < k:
        return 1.0
    return 1.0 - prod((wrong - i) / (num_responses - i) for i in range(k))


def majority_solved(group: Sequence[Judged]) -> float:
    """How often the answer with the most votes is right; where several have as many, their mean: no order decides.

    Responses that vote together may be judged apart ("7" and "7 " by an exact reward): then their mean counts.

    Source: self-consistency, arXiv:2203.11171.
    """
    votes = Counter(response.vote for response in group)
    most = max(votes.values())
    winners = [vote for vote, count in votes.items() if count == most]
    return sum(r.solved for r in group if r.vote in winners) / (most * len(winners))


def file_names(files: Sequence[str]) -> list[str]:
    """Short names that differ: a file's own, with as many of its folders as it takes ("gsm8k/test", "math/test")."""
    paths = [Path(file).absolute().with_suffix("").parts for file in files]
    names = []
    for number, parts in enumerate(paths):
        others = paths[:number] + paths[number + 1 :]
        depth = next((d for d in range(1, len(parts)) if all(parts[-d:] != other[-d:] for other in others)), None)
        names.append("/".join(parts[-depth:]) if depth else f"{parts[-1]}_{number + 1}")  # the same file twice
    return names
