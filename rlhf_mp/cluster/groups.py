"""What is done with sampled groups before they are trained on: checked, chosen, punished for length. Plain Python."""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev

from rlhf_mp.config.reward import OverlongBufferConfig
from rlhf_mp.config.reward_model import RewardModelConfig
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.data.types import Sums, Trajectory
from rlhf_mp.errors import SampleError
from rlhf_mp.rewards.rules import overlong_penalty

SHOWN = 200  # characters of a text in an error


@dataclass(frozen=True)
class Group:
    """A prompt and the responses to it."""

    prompt: Prompt
    responses: list[Trajectory]


Worth = Callable[[Trajectory], float]


def worth_of(own: RewardModelConfig) -> Worth:
    """What tells the responses to a prompt apart: the reward, with a served reward model its score beside it.

    The score is as the model gives it: normalising it needs what only the training ranks have seen, and leaves equal
    what is equal.
    """
    if not own.served:
        return lambda t: t.reward
    return lambda t: own.rule_coef * t.reward + own.coef * t.rm_score


def require_numbers(groups: Sequence[Group], text: Callable[[list[int]], str]) -> None:
    """
    Raises:
        SampleError: a reward is NaN or infinite; names the response.
    """
    for group in groups:
        for t in group.responses:
            if not math.isfinite(t.reward) or not math.isfinite(t.baseline or 0.0):
                raise SampleError(
                    f"the reward of a response is {t.reward} (of the greedy one: {t.baseline}), not a finite number\n"
                    f"    prompt {group.prompt.index}: {group.prompt.text[-SHOWN:]!r}\n"
                    f"    response: {text(t.response_ids)[:SHOWN]!r}\n"
                    f"    reference answer: {group.prompt.answer[:SHOWN]!r}\n"
                    "    fix: the reward function must return a finite number for every response"
                )


async def filled(
    draw: Callable[[int], Awaitable[list[Group]]], size: int, max_batches: int, worth: Worth
) -> tuple[list[Group], Sums]:
    """Dynamic sampling: draw batches until ``size`` groups have rewards that differ. What is left over is not used.

    Args:
        draw: samples the so-manieth batch of prompts of this step.
        worth: in which the responses of a group must differ.

    Raises:
        SampleError: ``max_batches`` were not enough.

    Source: DAPO, arXiv:2503.14476 eq. 11.
    """
    kept: list[Group] = []
    num_drawn = 0
    for number in range(max_batches):
        drawn = await draw(number)
        num_drawn += len(drawn)
        kept += [group for group in drawn if len(set(map(worth, group.responses))) > 1]
        if len(kept) >= size:
            metrics = {"num_gen_batches": (number + 1, 1), "kept_groups_fraction": (len(kept), num_drawn)}
            return kept[:size], {f"rollout/{name}": pair for name, pair in metrics.items()}
    raise SampleError(
        f"dynamic sampling found {len(kept)} groups whose rewards differ among {num_drawn} prompts, and a step needs "
        f"{size}: most prompts are always or never solved\n"
        "    fix: algorithm.filter_groups.max_num_gen_batches=<more>, more responses (actor_rollout_ref.rollout.n), "
        "other prompts, or algorithm.filter_groups.enable=false"
    )


def numbered(groups: Sequence[Group]) -> list[list[Trajectory]]:
    """The responses, with group ids that are positions."""
    return [[replace(t, group_id=i) for t in group.responses] for i, group in enumerate(groups)]


def shaped(t: Trajectory, max_length: int, buffer: OverlongBufferConfig) -> Trajectory:
    """With the reward lowered by up to ``buffer.penalty_factor`` for a response that ends in the buffer."""
    penalty = overlong_penalty(len(t.response_ids), max_length, buffer.len)
    return replace(t, reward=t.reward + buffer.penalty_factor * penalty)


def step_metrics(groups: Sequence[Sequence[Trajectory]], step: int) -> Sums:
    """What was sampled for a step."""
    responses = [t for group in groups for t in group]
    count = len(responses)
    rewards = [t.reward for t in responses]
    tokens = sum(len(t.response_ids) for t in responses)
    metrics = {
        "rollout/reward_mean": (sum(rewards), count),
        "rollout/reward_std": (pstdev(rewards), 1),
        "rollout/solved_groups_fraction": (sum(all(t.reward >= 1.0 for t in g) for g in groups), len(groups)),
        "rollout/groups_without_spread_fraction": (sum(len({t.reward for t in g}) == 1 for g in groups), len(groups)),
        "rollout/response_tokens": (tokens, 1),
        "rollout/response_length_mean": (tokens, count),
        "rollout/response_length_max": (max(len(t.response_ids) for t in responses), 1),
        "rollout/prompt_length_mean": (sum(len(t.prompt_ids) for t in responses), count),
        "rollout/truncated_fraction": (sum(t.finish_reason == "length" for t in responses), count),
        "rollout/staleness_mean": (sum(step - t.version for t in responses), count),
    }
    greedy = [group[0].baseline for group in groups if group[0].baseline is not None]
    return metrics | ({"rollout/greedy_reward_mean": (fmean(greedy), 1)} if greedy else {})
