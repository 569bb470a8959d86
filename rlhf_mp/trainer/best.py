"""Which validation was the best, by one metric: its checkpoint is kept whatever else is removed, or ends the run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_mp.errors import ConfigError, Problem


@dataclass
class Best:
    """The best validation so far; of equal ones the first. The untrained model is not one of them."""

    metric: str
    mode: Literal["max", "min"]
    value: float | None = None
    step: int | None = None
    stop_at: float | None = None  # the run ends there

    def offer(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether the validation after ``step`` steps is better than all before it; it is the best from then on.

        Raises:
            ConfigError: validation has no such metric.
        """
        if self.metric not in metrics:
            known = ", ".join(name for name in metrics if name.startswith("eval/"))
            reason = f"validation has no such metric; it has: {known}"
            raise ConfigError(
                [Problem("trainer.best_metric", self.metric, reason, "trainer.best_metric=eval/accuracy")]
            )
        value = metrics[self.metric]
        if step == 0 or value != value:
            return False
        if self.value is not None and not self._better(value, self.value):
            return False
        self.value, self.step = value, step
        return True

    @property
    def good_enough(self) -> bool:
        """Whether the run shall end."""
        return None not in (self.stop_at, self.value) and not self._better(self.stop_at, self.value)

    def _better(self, a: float, b: float) -> bool:
        return a > b if self.mode == "max" else a < b

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self.metric, "mode": self.mode, "value": self.value, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a checkpoint; one that followed another metric says nothing about this one."""
        if state is not None and (state["metric"], state["mode"]) == (self.metric, self.mode):
            self.value, self.step = state["value"], state["step"]
