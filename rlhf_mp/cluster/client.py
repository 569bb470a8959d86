"""The scheduler, as one rank sees it. Every rank fetches its own share; none relays."""

from collections.abc import Sequence
from typing import Any

from rlhf_mp.cluster.actors import DataFacts
from rlhf_mp.cluster.bootstrap import result
from rlhf_mp.data.prompts import Row
from rlhf_mp.data.types import SampleText, Share, Sums


class RolloutClient:
    """Calls that change the scheduler are made by rank 0 alone; on other ranks they do nothing."""

    def __init__(self, actor: Any, rank: int):
        self.actor, self.rank = actor, rank
        self._share = rank
        self._questions = 0  # asked by this rank; the others ask the same ones

    def with_share(self, dp_rank: int) -> "RolloutClient":
        """One that fetches the share of ``dp_rank``: ranks that hold parts of one model get the same."""
        client = RolloutClient(self.actor, self.rank)
        client._share = dp_rank
        return client

    def facts(self) -> DataFacts:
        return result(self.actor.facts.remote())

    def fetch(self, step: int) -> Share | None:
        """None on every rank: no engine has the live weights; publish them again, and ask again."""
        self._questions += 1
        return result(self.actor.fetch.remote(step, self._share, self._questions))

    def sample(self, step: int, rows: Sequence[Row]) -> Share | None:
        """None as for ``fetch``."""
        self._questions += 1
        return result(self.actor.sample.remote(step, rows, self._share, self._questions))

    def publish(self, version: int) -> None:
        if self.rank == 0:
            result(self.actor.publish.remote(version))

    def evaluate(self) -> tuple[Sums, list[SampleText]] | None:
        """None as for ``fetch``."""
        self._questions += 1
        evaluation = result(self.actor.evaluate.remote(self._questions))
        if evaluation is None:
            return None
        return (evaluation.metrics, evaluation.samples) if self.rank == 0 else ({}, [])

    def state_dict(self, step: int) -> dict[str, Any]:
        return result(self.actor.state_dict.remote(step))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.rank == 0:
            for remark in result(self.actor.load_state_dict.remote(state)):
                print(remark)
