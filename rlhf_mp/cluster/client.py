"""The scheduler, as one rank sees it. Every rank fetches its own share; none relays."""

from typing import Any

from rlhf_mp.cluster.actors import DataFacts
from rlhf_mp.cluster.bootstrap import result
from rlhf_mp.data.types import SampleText, Share, Sums


class RolloutClient:
    """Calls that change the scheduler are made by rank 0 alone; on other ranks they do nothing."""

    def __init__(self, actor: Any, rank: int):
        self.actor, self.rank = actor, rank
        self._share = rank

    def with_share(self, dp_rank: int) -> "RolloutClient":
        """One that fetches the share of ``dp_rank``: ranks that hold parts of one model get the same."""
        client = RolloutClient(self.actor, self.rank)
        client._share = dp_rank
        return client

    def facts(self) -> DataFacts:
        return result(self.actor.facts.remote())

    def fetch(self, step: int) -> Share:
        return result(self.actor.fetch.remote(step, self._share))

    def publish(self, version: int) -> None:
        if self.rank == 0:
            result(self.actor.publish.remote(version))

    def evaluate(self) -> tuple[Sums, list[SampleText]]:
        if self.rank != 0:
            return {}, []
        evaluation = result(self.actor.evaluate.remote())
        return evaluation.metrics, evaluation.samples

    def state_dict(self, step: int) -> dict[str, Any]:
        return result(self.actor.state_dict.remote(step))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.rank == 0:
            for remark in result(self.actor.load_state_dict.remote(state)):
                print(remark)
