"""What travels through a step. Token ids, never text: re-tokenizing is not an inverse.

Shapes: N or B sequences, T tokens per padded sequence. Every per-token tensor is aligned on the token it
scores: ``logprobs[b, t] = log p(token[b, t] | token[b, :t])``, so ``logprobs[:, 0] = 0``.
``mask[b, t]`` is 1 where the policy sampled token t, and 0 on prompt, tool output and padding.
Sequences are padded on the right. A causal model never lets a real token see the padding after it,
so no attention mask is needed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

Sums = dict[str, tuple[float, float]]
"""Metrics as (sum, count): ranks and micro-batches add them, whoever reports divides once.

Of a name that ends in _max or _min the largest or smallest is kept, with count 1."""


FinishReason = Literal["stop", "length", "abort", "turns", "time", "error"]
"""Why a response ended; the last three are an episode's: limits on turns and time, a failed environment."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sampled response to one prompt, or one episode of several turns."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_logprobs: list[float]  # of the distribution sampled from, i.e. after temperature
    loss_mask: list[bool]  # per response token; False where the policy did not choose it
    reward: float
    group_id: int  # equal for all responses to one prompt of one step
    version: int  # weight version that sampled it, the oldest of several
    finish_reason: FinishReason
    baseline: float | None = None  # reward of the greedy response to the same prompt, where it was sampled
    scores: dict[str, float] = field(default_factory=dict)  # per reward term, before its weight
    source: str = ""  # of its prompt
    num_turns: int = 1
    token_versions: list[int] = field(default_factory=list)  # per response token; empty: all of them ``version``
    payments: list[tuple[int, float]] = field(default_factory=list)  # response token, and what of ``reward`` it earned
    rm_score: float | None = None  # the reward model's, where it is served by SGLang
    baseline_rm_score: float | None = None  # the same of the greedy response

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass
class TokenBatch:
    """Right-padded sequences on one device. Optional fields are filled by scoring and estimating."""

    tokens: Int[Tensor, "B T"]
    mask: Float[Tensor, "B T"]
    rewards: Float[Tensor, "B"]
    group_ids: Int[Tensor, "B"]
    lengths: Int[Tensor, "B"]  # real tokens of each row
    rollout_logprobs: Float[Tensor, "B T"]
    old_logprobs: Float[Tensor, "B T"] | None = None
    ref_logprobs: Float[Tensor, "B T"] | None = None
    advantages: Float[Tensor, "B T"] | None = None
    values: Float[Tensor, "B T"] | None = None  # the critic's, of the state each token is drawn from
    returns: Float[Tensor, "B T"] | None = None  # what those values are trained towards
    baselines: Float[Tensor, "B"] | None = None  # reward of the greedy response to the same prompt
    paid: Float[Tensor, "B T"] | None = None  # what of ``rewards`` an environment paid, at the ends of its turns
    token_rewards: Float[Tensor, "B T"] | None = None  # where in a response its reward is earned
    rm_scores: Float[Tensor, "B"] | None = None  # the reward model's, where they came with the responses
    baseline_rm_scores: Float[Tensor, "B"] | None = None  # the same of the greedy responses
    selected: Float[Tensor, "B T"] | None = None  # 1 at tokens that the policy loss treats apart

    def select(self, rows: list[int]) -> "TokenBatch":
        """Some rows, trimmed to the longest of them. No rows gives one sequence that counts for nothing."""
        if not rows:
            return self.select([0]).silenced()
        width = int(self.lengths[rows].max())
        return self._map(lambda x: x[rows, :width] if x.dim() == 2 else x[rows])

    def silenced(self) -> "TokenBatch":
        """The first two tokens of the first row with mask 0: a micro-batch that adds nothing to any sum."""
        stub = self._map(lambda x: x[:1, :2] if x.dim() == 2 else x[:1])
        return replace(stub, mask=torch.zeros_like(stub.mask))

    def with_old_logprobs(self, old: Float[Tensor, "B T"]) -> "TokenBatch":
        return replace(self, old_logprobs=old)

    def to(self, device: torch.device | str) -> "TokenBatch":
        return self._map(lambda x: x.to(device))

    def _map(self, change) -> "TokenBatch":
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return TokenBatch(**{name: None if x is None else change(x) for name, x in values.items()})


@dataclass(frozen=True)
class Totals:
    """Counts of a whole mini-batch over all ranks and micro-batches: what losses divide by (R3)."""

    num_tokens: int  # tokens with mask 1
    num_sequences: int


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step's work on this rank. Equally many micro-batches on every rank, some may be empty."""

    micro_batches: list[list[int]]  # rows of the share's batch
    totals: Totals


@dataclass(frozen=True)
class Passes:
    """How one model goes over this rank's rows."""

    score_rows: list[list[int]]  # forward-only micro-batches
    minibatches: list[MiniBatch]  # one optimizer step each, all epochs


@dataclass(frozen=True)
class TokenTrace:
    """A response token by token; all lists are of one length."""

    ids: list[int]
    logprobs: list[float]  # of the distribution sampled from
    loss_mask: list[bool]  # False where the policy did not choose the token
    finish_reason: str
    advantages: list[float] | None = None  # None: nothing was trained on it
    ref_logprobs: list[float] | None = None
    values: list[float] | None = None  # the critic's


@dataclass(frozen=True)
class SampleText:
    """A response as people read it."""

    prompt: str
    response: str
    reward: float
    truth: str
    source: str = "training"  # or the name of a validation file
    in_log: bool = True  # False: only for the page of rollouts, which shows more than a log can
    trace: TokenTrace | None = None
    row: int | None = None  # in the share it comes with


@dataclass(frozen=True)
class Share:
    """What one data-parallel rank gets of a step: whole groups (R2), and how to cut them."""

    trajectories: list[Trajectory]
    score_rows: list[list[int]]  # forward-only micro-batches
    minibatches: list[MiniBatch]
    metrics: Sums = field(default_factory=dict)  # of the whole step; rank 0 only
    samples: list[SampleText] = field(default_factory=list)  # a few texts for the log; rank 0 only
    critic: Passes | None = None  # the critic's own cuts and epochs, where there is one


@dataclass(frozen=True)
class PolicyOutput:
    """What a loss sees of a policy; logits never leave the engine."""

    logprobs: Float[Tensor, "B T"]  # of the batch's own tokens, after temperature; requires grad
    entropy: Float[Tensor, "B T"]  # of the distribution each token was drawn from, in nats


@dataclass(frozen=True)
class ValueOutput:
    """What a loss sees of a critic."""

    values: Float[Tensor, "B T"]  # V(tokens before t), the state that token t is drawn from; requires grad


@dataclass(frozen=True)
class RewardOutput:
    """What a loss sees of a reward model."""

    rewards: Float[Tensor, "B"]  # read off each sequence's last token; requires grad


Output = PolicyOutput | ValueOutput | RewardOutput

LossFn = Callable[[Output, TokenBatch, Totals], tuple[Float[Tensor, ""], dict[str, tuple[Tensor, Tensor]]]]
"""(model output, micro-batch, counts of the mini-batch) -> (its part of the loss, metrics as (sum, count))."""
