"""One host per SGLang server: the actor that owns it, and the same as the scheduler sees it."""

import asyncio
import os
from pathlib import Path
from typing import Any

from rlhf_mp.cluster.bootstrap import ActorGone, awaited
from rlhf_mp.cluster.processes import belonging_to
from rlhf_mp.cluster.shared_memory import note_files
from rlhf_mp.config.schema import RolloutConfig, RunConfig
from rlhf_mp.errors import EngineError, EngineLost
from rlhf_mp.rollout.reward_server import reward_server_knobs
from rlhf_mp.rollout.served_adapter import AdapterPlan, plan_adapter
from rlhf_mp.rollout.sglang_server import Address, Kind, ServerPlan, SGLangServer, describe_exit, server_name

PORT_TAKEN, PORT_TRIES = "address already in use", 3


def engine_log(logs: Path, index: int, start: int, kind: Kind = "engine") -> Path:
    """Every server has a log of its own: what the one before wrote when it died stays as it was."""
    return logs / (f"{kind}_{index}_restart_{start}.log" if start else f"{kind}_{index}.log")


def adapter_of(plan: ServerPlan, config: RunConfig) -> AdapterPlan | None:
    """What the server serves beside its model."""
    policy = config.actor_rollout_ref
    return plan_adapter(policy.model) if plan.kind == "engine" and policy.weight_sync.adapter_only else None


def knobs_of(plan: ServerPlan, config: RunConfig) -> RolloutConfig:
    """What the server's command line is made from."""
    return config.actor_rollout_ref.rollout if plan.kind == "engine" else reward_server_knobs(config)


class EngineHost:
    """Owns one SGLang server: the server ends with this actor, this actor with the job."""

    def __init__(self, plan: ServerPlan, config: RunConfig, logs: Path, address: str):
        """
        Args:
            address: of this host, where the server shall listen.
        """
        self.plan, self.rollout, self.logs, self.host = plan, knobs_of(plan, config), logs, address
        self.context = config.data.max_prompt_length + config.data.max_response_length
        self.adapter = adapter_of(plan, config)
        self.num_restarts = 0
        self.server = self._start()

    def _start(self) -> SGLangServer:
        log = engine_log(self.logs, self.plan.index, self.num_restarts, self.plan.kind)
        return SGLangServer(self.plan, self.rollout, self.context, log, host=self.host, adapter=self.adapter)

    async def ready(self) -> Address:
        """Where the server answers, once it does. It listens only after it has loaded, and its port may be taken then.

        Raises:
            EngineError: it ended, or is not up in time.
        """
        for left in reversed(range(PORT_TRIES)):
            try:
                await asyncio.to_thread(self.server.wait_ready, self.rollout.startup_timeout_s)
                break
            except EngineError:
                if not left or PORT_TAKEN not in self.server.log_tail():
                    raise
                await self._start_again()
        if tmp := os.environ.get("RLHF_MP_TMP"):  # a guard, which looks now and then, may come too late
            note_files(Path(tmp), belonging_to(f"RLHF_MP_JOB={os.environ['RLHF_MP_JOB']}", set()))
        return self.server.address

    async def _start_again(self) -> None:
        await asyncio.to_thread(self.server.kill)
        self.server = self._start()  # by this thread, which lasts: see SGLangServer

    async def ended(self) -> str:
        """Waits for the server's end, and says what it was."""
        return describe_exit(await asyncio.to_thread(self.server.process.wait))

    async def restart(self) -> Address:
        """End what is left of the server, start another by the same plan, and wait until it answers.

        Raises:
            EngineError: it ended, or is not up in time.
        """
        self.num_restarts += 1
        await self._start_again()
        return await self.ready()


class RemoteHost:
    """An ``EngineHost`` in its own process."""

    def __init__(self, index: int, actor: Any, kind: Kind = "engine"):
        self.name, self.actor = server_name(kind, index), actor

    async def ended(self) -> str:
        try:
            return await awaited(self.actor.ended.remote())
        except ActorGone:
            return "the process that owns it was killed or crashed"

    async def restart(self) -> Address:
        try:
            return await awaited(self.actor.restart.remote())
        except ActorGone as error:
            raise EngineLost(self.name, "the process that owns it was killed or crashed") from error
