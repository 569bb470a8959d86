"""Which engines may be sampled from, and what becomes of one that dies, hangs or is too slow. Plain asyncio: no Ray.

An engine is starting (no client), fresh (it answers; nothing has proved which weights it has) or live (the last swap
proved its version). Only live ones are sampled from (R4). One that is lost is taken out at once, with everything it was
doing: that is done again elsewhere, from the start. It is restarted and fresh until a swap has reached it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from rlhf_mp.data.types import Sums
from rlhf_mp.errors import EngineError, EngineLost, SyncError
from rlhf_mp.rollout.base import Completion, RolloutEngine, SamplingParams
from rlhf_mp.rollout.sglang_server import Address, Kind, server_name

T = TypeVar("T")
GRACE_S = 1.5
"""A request to an engine that dies mostly fails before its death is known; the death is the better reason."""


class Host(Protocol):
    """Owns the server of one engine."""

    async def ended(self) -> str:
        """Waits for the end of the server that runs now, and says what it was."""
        ...

    async def restart(self) -> Address:
        """Ends what is left of the server and starts another one.

        Raises:
            EngineError: it did not come up.
        """
        ...


class Client(RolloutEngine, Protocol):
    """A connection to one server."""

    async def check(self, timeout_s: float) -> None:
        """
        Raises:
            EngineLost: it does not answer in time.
        """
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Rules:
    """When an engine counts as lost, and how often it may."""

    max_restarts: int  # of each engine
    check_interval_s: float
    check_timeout_s: float


@dataclass(frozen=True)
class Target:
    """A server that a swap goes to."""

    index: int  # of its engine
    start: int  # the engine's so-manieth server; the first is 0
    address: Address


@dataclass(frozen=True)
class News:
    """What the user shall read about an engine."""

    index: int
    start: int  # of the server it is about
    text: str
    restarting: bool = False
    fatal: bool = False  # the run cannot go on
    kind: Kind = "engine"

    @property
    def name(self) -> str:
        return server_name(self.kind, self.index)


class Member:
    """One engine, whichever server it has at the moment."""

    def __init__(self, index: int, host: Host, kind: Kind):
        self.index, self.host, self.name = index, host, server_name(kind, index)
        self.start = 0
        self.in_flight = 0  # responses
        self.out_since: float | None = None
        self.client: Client | None = None  # None: there is no server, or it is starting
        self.version: int | None = None  # that a swap has proved

    def joins(self, address: Address, client: Client) -> None:
        """A server is up; nothing is known of its weights."""
        self.address, self.client, self.version = address, client, None
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.end = asyncio.ensure_future(self.host.ended())

    def leaves(self) -> None:
        self.client = self.version = None
        self.gone.set_result(None)


class EnginePool:
    """``Engines`` that are watched and replaced."""

    kind: Kind = "engine"
    is_back = "; a swap must bring it the weights"

    def __init__(
        self,
        rules: Rules,
        connect: Callable[[str, Address], Client],
        in_flight: Callable[[str, int], object] = lambda name, responses: None,
    ):
        """
        Args:
            in_flight: told of every change, an engine's name and the responses that it works on.
        """
        self.rules, self._connect, self._in_flight = rules, connect, in_flight
        self.members: list[Member] = []
        self.news: asyncio.Queue[News] = asyncio.Queue()
        self.failure: EngineError | None = None  # an engine is lost for good
        self._moved = asyncio.Event()
        self._waiting = 0  # groups that have no engine
        self._swaps = 0  # begun and ended: odd while one is going on
        self._tasks: set[asyncio.Task] = set()
        self._counts = {"engine_restarts": 0.0, "engine_out_s": 0.0, "resampled_groups": 0.0}

    def adopt(self, hosts: Sequence[Host], addresses: Sequence[Address]) -> None:
        """Engines whose first servers are up."""
        self.members = [Member(index, host, self.kind) for index, host in enumerate(hosts)]
        for member, address in zip(self.members, addresses, strict=True):
            self._join(member, address)

    # --- sampling

    async def run(self, num_responses: int, work: Callable[[RolloutEngine], Awaitable[T]]) -> T:
        """
        Raises:
            EngineError: an engine is lost for good, or refused.
        """
        while True:
            member = await self._least_loaded()
            start = member.start
            self._count(member, num_responses)
            try:
                return await self._unless_lost(member, work(self._handle(member)))
            except EngineLost as loss:
                self.lost(member.index, start, loss.reason)
                self._counts["resampled_groups"] += 1
            finally:
                self._count(member, -num_responses)

    def _count(self, member: Member, more: int) -> None:
        member.in_flight += more
        self._in_flight(member.name, member.in_flight)

    def _handle(self, member: Member) -> RolloutEngine:
        """What ``work`` gets of a live one."""
        return Proved(member, member.client)

    async def _least_loaded(self) -> Member:
        if not self._live:
            self._waiting += 1
            self._move()
            try:
                await self._until(lambda: self.failure or self._live)
            finally:
                self._waiting -= 1
        if self.failure:
            raise self.failure
        return min(self._live, key=lambda member: member.in_flight)

    async def _unless_lost(self, member: Member, work: Awaitable[T]) -> T:
        """The result of ``work``; it is given up once the engine is taken out."""
        job = asyncio.ensure_future(work)
        try:
            await asyncio.wait({job, member.gone}, return_when=asyncio.FIRST_COMPLETED)
            if not job.done():
                raise EngineLost(member.name, "was taken out")
            return job.result()
        finally:
            job.cancel()

    @property
    def _live(self) -> list[Member]:
        return [member for member in self.members if member.version is not None]

    # --- swaps

    def targets(self) -> list[Target]:
        """A swap begins: the servers it goes to."""
        self._swaps += 1 - self._swaps % 2  # it may begin again before it has ended
        return [Target(m.index, m.start, m.address) for m in self.members if m.client is not None]

    def settle(self, version: int, served: Sequence[Target]) -> None:
        """A swap has ended: these servers are proved to have ``version``."""
        self._swaps += self._swaps % 2
        for member in self.members:
            if member.client is None or Target(member.index, member.start, member.address) not in served:
                continue
            member.version = version
            if member.out_since is not None:
                self._counts["engine_out_s"] += asyncio.get_running_loop().time() - member.out_since
                member.out_since = None
        self._move()

    def rest(self) -> None:
        """Engines give their memory back: none serves anything until a swap has settled."""
        for member in self.members:
            member.version = None

    async def swap_needed(self) -> None:
        """Waits until sampling can go on only after a swap: no engine is live, and one has come back."""
        await self._until(lambda: self._waiting and not self._live and any(m.client for m in self.members))

    # --- losses

    def lost(self, index: int, start: int, reason: str) -> None:
        """Take a server out, unless it is out already."""
        member = self.members[index]
        if member.client is None or member.start != start:
            return
        client = member.client
        member.leaves()
        if member.out_since is None:
            member.out_since = asyncio.get_running_loop().time()
        self._spawn(self._replace(member, client, reason))

    async def _replace(self, member: Member, client: Client, reason: str) -> None:
        await asyncio.wait({member.end}, timeout=GRACE_S)
        if member.end.done():
            reason = member.end.result()
        await client.close()
        allowed = self.rules.max_restarts
        while member.start < allowed:
            text = f"{reason}; restart {member.start + 1} of {allowed} (trainer.max_engine_restarts)"
            self._tell(member, text, restarting=True)
            member.start += 1
            self._counts["engine_restarts"] += 1
            try:
                address = await member.host.restart()
            except EngineError as error:
                reason = error.reason
                continue
            out_s = asyncio.get_running_loop().time() - member.out_since
            self._join(member, address)
            self._tell(member, f"answers again after restart {member.start}, {out_s:.0f} s later{self.is_back}")
            return
        used_up = f", after {allowed} restart(s) (trainer.max_engine_restarts)" if allowed else ""
        self.failure = EngineError(member.name, reason + used_up)
        self._tell(member, reason + used_up, fatal=True)
        self._move()

    def _tell(self, member: Member, text: str, *, restarting: bool = False, fatal: bool = False) -> None:
        self.news.put_nowait(News(member.index, member.start, text, restarting, fatal, self.kind))

    def _join(self, member: Member, address: Address) -> None:
        member.joins(address, self._connect(member.name, address))
        self._spawn(self._watch(member, member.start))
        self._spawn(self._check(member, member.client))
        self._move()

    async def _watch(self, member: Member, start: int) -> None:
        self.lost(member.index, start, await member.end)

    async def _check(self, member: Member, client: Client) -> None:
        """Ask a server now and then whether it is well. What it does during a swap is for the swap to judge."""
        while member.client is client:
            await asyncio.sleep(self.rules.check_interval_s)
            swaps = self._swaps
            try:
                if member.client is client and swaps % 2 == 0:
                    await client.check(self.rules.check_timeout_s)
            except EngineLost as loss:
                if member.client is client and swaps == self._swaps:
                    self.lost(member.index, member.start, loss.reason)

    # --- the rest

    def metrics(self) -> Sums:
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0.0)
        return {f"rollout/{name}": (count, 1) for name, count in counts.items()}

    async def _until(self, condition: Callable[[], object]) -> None:
        while not condition():
            await self._moved.wait()

    def _move(self) -> None:
        """Whoever waits shall look again."""
        self._moved.set()
        self._moved = asyncio.Event()

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)  # the loop keeps none alive
        task.add_done_callback(self._tasks.discard)


@dataclass(frozen=True)
class Proved:
    """A live engine, and a last look that it answers from weights no older than a swap has proved."""

    member: Member
    client: Client

    async def generate(
        self, prompt_ids: list[int], params: SamplingParams, seeds: Sequence[int | None]
    ) -> list[Completion]:
        proved = self.member.version
        if proved is None or self.member.client is not self.client:
            raise EngineLost(self.member.name, "was taken out")
        found = await self.client.generate(prompt_ids, params, seeds)
        for completion in found:
            if completion.version < proved:
                raise SyncError(f"{self.member.name} answered from weight version {completion.version}, not {proved}")
        return found
