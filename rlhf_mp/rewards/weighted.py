"""The reward of a run: a weighted sum of terms, each judged beside the others, counted and timed by itself."""

import asyncio
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlhf_mp.config.reward import EnvironmentTerm, RewardConfig, Term, terms_of
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.errors import RewardError
from rlhf_mp.rewards.base import Failure, Response, Reward, Setting, rewards
from rlhf_mp.rewards.function import FunctionReward

MAX_LOGGED = 100  # failures with their samples, per term and step; the rest are only counted
Sums = dict[str, tuple[float, float]]  # as data.types.Sums, which would import torch


@dataclass(frozen=True)
class Worth:
    """One response's worth."""

    reward: float
    scores: dict[str, float]  # per term, before its weight
    paid_weight: float = 0.0  # with which ``reward`` holds what the environment paid


@dataclass
class Tally:
    """What one term did since the last ``settle``."""

    count: int = 0  # responses
    total: float = 0.0  # of their scores
    latencies: list[float] = field(default_factory=list)  # s, per group, waiting for its turn included
    failures: Counter[str] = field(default_factory=Counter)
    last: str = ""  # the last failure's reason


class WeightedReward:
    """Every term whose ``sources`` name the row judges the group at the same time as the others."""

    def __init__(
        self, terms: Sequence[tuple[Term, Reward]], *, max_failed_fraction: float = 0.5, log: Path | None = None
    ):
        self._terms = terms
        self._max_failed_fraction, self._log = max_failed_fraction, log
        self._tallies: dict[str, Tally] = defaultdict(Tally)
        self._sources: dict[str, tuple[float, float]] = {}

    async def start(self) -> list[str]:
        """Start all terms; what each wants known. Raises RewardError."""
        notes = await asyncio.gather(*(reward.start() for _, reward in self._terms))
        return [f"reward {term.label}: {note}" for (term, _), note in zip(self._terms, notes, strict=True) if note]

    def check_sources(self, prompts: Sequence[Prompt]) -> None:
        """Raise RewardError for a row that no term judges."""
        if all(term.sources for term, _ in self._terms):
            served = {source for term, _ in self._terms for source in term.sources}
            if missing := sorted({prompt.source for prompt in prompts} - served):
                raise RewardError(
                    f"no reward term judges rows whose data.reward_fn_key column says {missing[0]!r}; "
                    f"known: {', '.join(sorted(served))}; add it to the sources of a term in reward.terms"
                )

    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> list[Worth]:
        """Worth of each response of a group."""
        terms = [(t, r) for t, r in self._terms if not t.sources or prompt.source in t.sources]
        columns = await asyncio.gather(*(self._term_scores(t, r, prompt, responses) for t, r in terms))
        hands_on = sum(term.weight for term, _ in terms if isinstance(term, EnvironmentTerm))
        judged = []
        for response, scores in zip(responses, zip(*columns, strict=True), strict=True):
            total = math.fsum(term.weight * score for (term, _), score in zip(terms, scores, strict=True))
            own = {term.label: score for (term, _), score in zip(terms, scores, strict=True)}
            judged.append(Worth(total, own, hands_on if response.failure is None else 0.0))
        if prompt.source:
            add(self._sources, f"reward/{prompt.source}/mean", sum(j.reward for j in judged), len(judged))
            add(self._sources, f"reward/{prompt.source}/solved", sum(j.reward >= 1.0 for j in judged), len(judged))
        return judged

    def settle(self) -> Sums:
        """What happened since the last call, as metrics.

        Raises:
            RewardError: a term failed on more than ``max_failed_fraction`` of its responses.
        """
        metrics, tallies = self._sources, self._tallies
        self._sources, self._tallies = {}, defaultdict(Tally)
        for label, tally in tallies.items():
            failed = tally.failures.total()
            if failed > self._max_failed_fraction * tally.count:
                raise RewardError(
                    f"reward term {label} failed on {failed} of {tally.count} responses (reward.max_failed_fraction = "
                    f"{self._max_failed_fraction:g}); {counts(tally.failures)}; the last one: {tally.last}"
                )
            metrics |= {
                f"reward_term/{label}/mean": (tally.total, tally.count),
                f"reward_term/{label}/latency_s": (sum(tally.latencies), len(tally.latencies)),
                f"reward_term/{label}/latency_max_s": (max(tally.latencies), 1),
                f"reward_term/{label}/failed_fraction": (failed, tally.count),
            }
            metrics |= {f"reward_term/{label}/failures_{kind}": (n, 1) for kind, n in tally.failures.items()}
        failures = sum(tally.failures.total() for tally in tallies.values())
        return metrics | {"reward_term/failures": (failures, 1)}

    async def close(self) -> None:
        await asyncio.gather(*(reward.close() for _, reward in self._terms))

    async def _term_scores(
        self, term: Term, reward: Reward, prompt: Prompt, responses: Sequence[Response]
    ) -> list[float]:
        tally, started = self._tallies[term.label], time.monotonic()
        try:
            found = checked(await reward.score(prompt, responses), len(responses))
        except RewardError:
            raise
        except Exception as error:  # a reward's own mistake: documented in docs/rewards.md to count as failures
            found = [Failure("error", f"{type(error).__name__}: {error}"[:500])] * len(responses)
        scores = []
        for response, score in zip(responses, found, strict=True):
            if isinstance(score, Failure):
                self._note(term, tally, score, prompt, response)
                score = term.failure_score
            scores.append(score)
        tally.latencies.append(time.monotonic() - started)
        tally.count += len(scores)
        tally.total += sum(scores)
        return scores

    def _note(self, term: Term, tally: Tally, failure: Failure, prompt: Prompt, response: Response) -> None:
        tally.failures[failure.kind] += 1
        tally.last = f"{failure.kind}: {failure.reason}"
        if self._log is not None and tally.failures.total() <= MAX_LOGGED:
            record = {
                "time": time.time(), "term": term.label, "kind": failure.kind, "reason": failure.reason,
                "prompt": prompt.text, "response": response.text, "truth": prompt.answer, "source": prompt.source,
            }  # fmt: skip
            with self._log.open("a") as log:
                log.write(json.dumps(record) + "\n")


def checked(scores: object, wanted: int) -> list[float | Failure]:
    """What a reward returned, with whatever is no finite number as a failure."""
    if not isinstance(scores, list | tuple):
        return [Failure("invalid", f"returned {type(scores).__name__} instead of a list")] * wanted
    if len(scores) != wanted:
        return [Failure("count", f"returned {len(scores)} scores for {wanted} responses")] * wanted
    return [one_checked(score) for score in scores]


def one_checked(score: object) -> float | Failure:
    if isinstance(score, Failure):
        return score
    if isinstance(score, int | float) and math.isfinite(score):
        return float(score)
    return Failure("invalid", f"returned {score!r:.100} instead of a finite number")


def add(sums: Sums, name: str, value: float, count: float) -> None:
    before = sums.get(name, (0.0, 0.0))
    sums[name] = (before[0] + value, before[1] + count)


def counts(failures: Counter[str]) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in failures.most_common())


def make_reward(config: RewardConfig, setting: Setting, log: Path | None = None) -> WeightedReward:
    """The reward that a checked config describes."""
    terms = [
        (term, (FunctionReward if ":" in term.name else rewards[term.name])(term, setting)) for term in terms_of(config)
    ]
    return WeightedReward(terms, max_failed_fraction=config.max_failed_fraction, log=log)
