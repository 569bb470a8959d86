"""Trajectories to padded tensors, and back to what people read."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from rlhf_mp.data.types import SampleText, TokenBatch, Trajectory


def collate(trajectories: Sequence[Trajectory]) -> TokenBatch:
    """One batch on CPU, padded on the right with 0, per-token fields aligned on the token they score.

    Raises:
        ValueError: no trajectory, or one whose log-probs or mask don't match its response tokens.
    """
    if not trajectories:
        raise ValueError("no trajectories to collate")
    for i, t in enumerate(trajectories):
        if not len(t.response_ids) == len(t.response_logprobs) == len(t.loss_mask):
            raise ValueError(
                f"trajectory {i} has {len(t.response_ids)} response tokens, {len(t.response_logprobs)} log-probs "
                f"and a mask of {len(t.loss_mask)}"
            )
    width = max(t.num_tokens for t in trajectories)

    def response_tensor(values: list[list[float]] | list[list[bool]]) -> torch.Tensor:
        rows = []
        for t, of_response in zip(trajectories, values, strict=True):
            rows.append([0.0] * len(t.prompt_ids) + [*of_response] + [0.0] * (width - t.num_tokens))
        return torch.tensor(rows, dtype=torch.float32)

    tokens = [t.prompt_ids + t.response_ids + [0] * (width - t.num_tokens) for t in trajectories]
    return TokenBatch(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        mask=response_tensor([t.loss_mask for t in trajectories]),
        rewards=torch.tensor([t.reward for t in trajectories], dtype=torch.float32),
        group_ids=torch.tensor([t.group_id for t in trajectories], dtype=torch.int64),
        lengths=torch.tensor([t.num_tokens for t in trajectories], dtype=torch.int64),
        rollout_logprobs=response_tensor([t.response_logprobs for t in trajectories]),
        paid=paid_at_turns(trajectories, width),
        baselines=known([t.baseline for t in trajectories]),
        rm_scores=known([t.rm_score for t in trajectories]),
        baseline_rm_scores=known([t.baseline_rm_score for t in trajectories]),
    )


def paid_at_turns(trajectories: Sequence[Trajectory], width: int) -> torch.Tensor | None:
    """[B T], if there are episodes of several turns."""
    if all(t.num_turns == 1 for t in trajectories):
        return None
    paid = torch.zeros(len(trajectories), width)
    for row, t in enumerate(trajectories):
        for token, amount in t.payments:
            paid[row, len(t.prompt_ids) + token] += amount
    return paid


def known(numbers: Sequence[float | None]) -> torch.Tensor | None:
    """One number per sequence, if there are any."""
    return None if None in numbers else torch.tensor(numbers, dtype=torch.float32)


def with_estimates(sample: SampleText, batch: TokenBatch) -> SampleText:
    """``sample`` with what training made of its row of ``batch``: advantages, and what reference and critic say."""
    if sample.trace is None or sample.row is None:
        return sample
    end = int(batch.lengths[sample.row])
    found = {
        name: values[sample.row, end - len(sample.trace.ids) : end].tolist()
        for name in ("advantages", "ref_logprobs", "values")
        if (values := getattr(batch, name)) is not None
    }
    return replace(sample, trace=replace(sample.trace, **found))
