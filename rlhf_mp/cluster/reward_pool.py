"""The reward model's servers, watched and replaced as engines are. Their weights never change, so they need no swap."""

import asyncio
from collections.abc import Callable

from rlhf_mp.cluster.engine_pool import Client, EnginePool, Member, News, Rules, Target
from rlhf_mp.data.types import Sums
from rlhf_mp.rollout.sglang_server import Address

ONLY_VERSION = 0


class RewardPool(EnginePool):
    """Servers that score. One that is lost is restarted; what it was scoring is scored elsewhere, or by it again.

    Args:
        news: of the engines; what happens here is told there too.
    """

    kind = "reward_server"
    is_back = ""

    def __init__(self, rules: Rules, connect: Callable[[str, Address], Client], news: asyncio.Queue[News]):
        super().__init__(rules, connect)
        self.news = news

    def _handle(self, member: Member) -> Client:
        return member.client

    def _join(self, member: Member, address: Address) -> None:
        super()._join(member, address)
        self.settle(ONLY_VERSION, [Target(member.index, member.start, address)])

    def metrics(self) -> Sums:
        found = super().metrics()
        return {f"reward_model/{name}": found[f"rollout/engine_{name}"] for name in ("restarts", "out_s")}
