"""The engines of a swap, as the scheduler's pool knows them."""

from collections.abc import Sequence
from typing import Any

from rlhf_mp.cluster.bootstrap import result
from rlhf_mp.cluster.engine_pool import Target
from rlhf_mp.errors import EngineLost
from rlhf_mp.rollout.sglang_client import EngineControl


class PoolRoster:
    """Used by the sending rank alone."""

    def __init__(self, actor: Any, size: int, timeout_s: float, prompt_s: float):
        """
        Args:
            timeout_s, prompt_s: as ``EngineControl``.
        """
        self.actor, self.size = actor, size
        self._timeout_s, self._prompt_s = timeout_s, prompt_s
        self._controls: dict[Target, EngineControl] = {}

    def targets(self) -> list[EngineControl]:
        found = result(self.actor.targets.remote())
        self._controls = {target: self._controls.get(target) or self._control(target) for target in found}
        return list(self._controls.values())

    def _control(self, target: Target) -> EngineControl:
        name = f"SGLang engine {target.index}"
        return EngineControl(name, target.address, self._timeout_s, index=target.index, prompt_s=self._prompt_s)

    def lost(self, engine: EngineControl, error: EngineLost) -> None:
        (target,) = (target for target, control in self._controls.items() if control is engine)
        result(self.actor.lost.remote(target.index, target.start, error.reason))

    def rest(self) -> None:
        result(self.actor.rest.remote())

    def settle(self, version: int, engines: Sequence[EngineControl]) -> None:
        served = [target for target, control in self._controls.items() if control in engines]
        result(self.actor.settle.remote(version, served))
