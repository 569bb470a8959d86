"""One host per SGLang server: the actors that own it and its parts, and the same as the scheduler sees it."""

import asyncio
import os
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from rlhf_mp.cluster.bootstrap import ActorGone, awaited
from rlhf_mp.cluster.processes import belonging_to
from rlhf_mp.cluster.shared_memory import note_files
from rlhf_mp.config.schema import RolloutConfig, RunConfig
from rlhf_mp.errors import EngineError, EngineLost
from rlhf_mp.rollout.reward_server import reward_server_knobs
from rlhf_mp.rollout.served_adapter import AdapterPlan, plan_adapter
from rlhf_mp.rollout.sglang_server import Address, Kind, ServerPlan, SGLangServer, describe_exit, free_port, server_name

OWNER_GONE = "the process that owns it was killed or crashed"
PORT_TAKEN, PORT_TRIES = "address already in use", 3


def engine_log(logs: Path, index: int, start: int, kind: Kind = "engine", part: int = 0) -> Path:
    """Every server has a log of its own: what the one before wrote when it died stays as it was."""
    name = f"{kind}_{index}" + f"_restart_{start}" * (start > 0) + f"_machine_{part + 1}" * (part > 0)
    return logs / f"{name}.log"


def adapter_of(plan: ServerPlan, config: RunConfig) -> AdapterPlan | None:
    """What the server serves beside its model."""
    policy = config.actor_rollout_ref
    return plan_adapter(policy.model) if plan.kind == "engine" and policy.weight_sync.adapter_only else None


def knobs_of(plan: ServerPlan, config: RunConfig) -> RolloutConfig:
    """What the server's command line is made from."""
    return config.actor_rollout_ref.rollout if plan.kind == "engine" else reward_server_knobs(config)


async def first_of(*answers: Coroutine[Any, Any, str]) -> str:
    """The first answer; nobody waits for the others any more."""
    tasks = [asyncio.ensure_future(answer) for answer in answers]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task.result() for task in tasks if task.done())
    finally:
        for task in tasks:
            task.cancel()


class ServerOwner:
    """Starts a server, or a part of one, on its machine: it ends with this actor, this actor with the job."""

    def __init__(self, plan: ServerPlan, config: RunConfig, logs: Path, address: str):
        """
        Args:
            address: of this host, where the server shall listen.
        """
        self.plan, self.rollout, self.logs, self.host = plan, knobs_of(plan, config), logs, address
        self.context = config.data.max_prompt_length + config.data.max_response_length
        self.adapter = adapter_of(plan, config)

    def launch(self, start: int, meet: str) -> None:
        """By a thread that lasts: see SGLangServer."""
        log = engine_log(self.logs, self.plan.index, start, self.plan.kind, self.plan.part)
        self.server = SGLangServer(
            self.plan, self.rollout, self.context, log, host=self.host, adapter=self.adapter, meet=meet
        )

    async def end(self) -> str:
        """Waits for the end of the process that runs now, and says what it was."""
        return describe_exit(await asyncio.to_thread(self.server.process.wait))

    async def note_shared_memory(self) -> None:
        """A guard, which looks now and then, may come too late."""
        if tmp := os.environ.get("RLHF_MP_TMP"):
            note_files(Path(tmp), belonging_to(f"RLHF_MP_JOB={os.environ['RLHF_MP_JOB']}", set()))


class EnginePart(ServerOwner):
    """Owns what a server of several machines has on one of them, but on its first."""

    server: SGLangServer | None = None

    async def run(self, start: int, meet: str) -> str:
        """From the start to the end of the process; what is left of the one before ends first."""
        if self.server:
            await asyncio.to_thread(self.server.kill)
        self.launch(start, meet)
        return await self.end()


class EngineHost(ServerOwner):
    """Owns one SGLang server."""

    def __init__(self, plan: ServerPlan, config: RunConfig, logs: Path, address: str, parts: Sequence[Any] = ()):
        """
        Args:
            parts: actors that own the rest of the server, machine by machine.
        """
        super().__init__(plan, config, logs, address)
        self.parts, self.num_restarts = parts, 0
        self._start()
        self._coming_up: asyncio.Task[None] | None = None  # made when first asked for: here is no event loop yet

    def _start(self) -> None:
        meet = f"{self.host}:{free_port()}" if self.parts else ""
        self._runs = [part.run.remote(self.num_restarts, meet) for part in self.parts]
        self.launch(self.num_restarts, meet)

    async def ready(self) -> Address:
        """Where the server answers, once it does.

        Raises:
            EngineError: it ended, or is not up in time.
        """
        await self._up()
        await self.note_shared_memory()
        for part in self.parts:
            part.note_shared_memory.remote()
        return self.server.address

    async def _up(self) -> None:
        """Whoever asks, there is one answer for each start."""
        if self._coming_up is None:
            self._coming_up = asyncio.ensure_future(self._come_up())
        await asyncio.shield(self._coming_up)

    async def _come_up(self) -> None:
        """A server listens only after it has loaded, and its port may be taken then."""
        for left in reversed(range(PORT_TRIES)):
            try:
                return await self._answers()
            except EngineError:
                if not left or PORT_TAKEN not in self.server.log_tail():
                    raise
                await self._start_again()

    async def _answers(self) -> None:
        up = asyncio.ensure_future(asyncio.to_thread(self.server.wait_ready, self.rollout.startup_timeout_s))
        lost = asyncio.ensure_future(self._lost_part())
        await asyncio.wait({up, lost}, return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            await asyncio.to_thread(self.server.kill)  # the others would wait for that part
            await asyncio.wait({up})
            raise EngineError(self.plan.name, lost.result()) from up.exception()
        lost.cancel()
        up.result()

    async def _lost_part(self) -> str:
        """Waits for the end of any part, and says what it was."""
        if not self._runs:
            await asyncio.Future()  # never
        return await first_of(*(self._part_end(part, run) for part, run in enumerate(self._runs, start=1)))

    async def _part_end(self, part: int, run: Any) -> str:
        log = engine_log(self.logs, self.plan.index, self.num_restarts, self.plan.kind, part)
        try:
            how = await awaited(run)
        except ActorGone:
            how = f"ended: {OWNER_GONE}"
        return f"its part on machine {part + 1} of {self.plan.num_parts} {how} ({log})"

    async def _start_again(self) -> None:
        await asyncio.to_thread(self.server.kill)
        self._start()

    async def ended(self) -> str:
        """Waits for the end of the server or of a part of it, and says what it was."""
        try:
            await self._up()
        except EngineError as error:
            return error.reason
        return await first_of(self.end(), self._lost_part())

    async def restart(self) -> Address:
        """End what is left of the server, start another by the same plan, and wait until it answers.

        Raises:
            EngineError: it ended, or is not up in time.
        """
        self.num_restarts += 1
        await self._start_again()
        self._coming_up = None
        return await self.ready()


class RemoteHost:
    """An ``EngineHost`` in its own process."""

    def __init__(self, index: int, actor: Any, kind: Kind = "engine"):
        self.name, self.actor = server_name(kind, index), actor

    async def ended(self) -> str:
        try:
            return await awaited(self.actor.ended.remote())
        except ActorGone:
            return OWNER_GONE

    async def restart(self) -> Address:
        try:
            return await awaited(self.actor.restart.remote())
        except ActorGone as error:
            raise EngineLost(self.name, OWNER_GONE) from error
