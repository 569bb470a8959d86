"""After a swap the engine and the trainer must agree on a response the engine has just sampled.

Checksums prove that the bytes arrived. The canary proves that they are the trainer's weights, in the right places.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlhf_mp.data.collate import collate
from rlhf_mp.data.types import Sums, Trajectory
from rlhf_mp.errors import SyncError
from rlhf_mp.rollout.sglang_client import EngineControl


@dataclass(frozen=True)
class Canary:
    """A fixed prompt, and how far apart the two may be."""

    prompt_ids: list[int]
    num_tokens: int
    temperature: float
    tolerance: float  # mean absolute difference of log-probs, in nats

    def sample(self, engine: EngineControl) -> Trajectory:
        got = engine.sample(self.prompt_ids, self.num_tokens, self.temperature)
        sampled = [True] * len(got.ids)
        return Trajectory(self.prompt_ids, got.ids, got.logprobs, sampled, 0.0, 0, got.version, got.finish_reason)

    def check(self, names: Sequence[str], sampled: Sequence[Trajectory], scored: torch.Tensor, version: int) -> Sums:
        """
        Args:
            sampled: one response of each engine.
            scored: the trainer's log-probs of them, [engines, T].

        Raises:
            SyncError: an engine disagrees, or serves another version.
        """
        batch = collate(sampled)
        differences = ((scored - batch.rollout_logprobs).abs() * batch.mask).sum(1) / batch.mask.sum(1)
        for name, response, difference in zip(names, sampled, differences.tolist(), strict=True):
            if response.version != version:
                raise SyncError(f"{name} serves weight version {response.version}, not {version}")
            if not difference <= self.tolerance:  # also true for NaN
                raise SyncError(
                    f"{name} at weight version {version}: log-probs of its own sample differ from the trainer's by "
                    f"{difference:.2e} on average; "
                    f"actor_rollout_ref.weight_sync.canary_tolerance is {self.tolerance:g}. "
                    "Either its weights are stale, or the two compute in different precision "
                    "(model.dtype, rollout.dtype, rollout.temperature)"
                )
        return {"sync/canary_logprob_diff": (float(differences.sum()), len(sampled))}


def make_canary(
    vocab_size: int, *, max_prompt: int, max_response: int, temperature: float, tolerance: float, seed: int
) -> Canary:
    """Random tokens as a prompt: every row of the embedding has a chance to be looked at."""
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(vocab_size, (min(16, max_prompt),), generator=generator).tolist()
    return Canary(prompt, min(32, max_response), temperature, tolerance)
