"""Which prompts a step samples, and which a resumed run must sample again. Pure Python."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from rlhf_mp.data.order import Order


@dataclass(frozen=True)
class Drawn:
    """A prompt on its way through one step."""

    serial: int  # no two draws of this run share one
    epoch: int
    index: int  # of the prompt


@dataclass
class _Step:
    """What must be known to continue after this step."""

    order: dict[str, Any]  # its state once the step had drawn
    unused: dict[int, Drawn]  # taken from the order until then, and not known to be used; by serial
    used: set[int]  # serials


class PromptFeed:
    """Prompts in an order's order. One that was drawn and not used comes again before any new one does.

    Steps may be drawn ahead of each other's end, but in order. Whatever was sampled ahead, ``state_dict`` of a step
    is as if no later step had begun: of all prompts taken so far, it holds back exactly those not used by then.
    """

    def __init__(self, order: Order, max_ahead: int):
        """
        Args:
            max_ahead: how many steps may be drawn before an earlier one has ended.
        """
        self.order, self.max_ahead = order, max_ahead
        self._waiting: deque[Drawn] = deque()
        self._unused: dict[int, Drawn] = {}
        self._steps: dict[int, _Step] = {}
        self._num_drawn = 0

    def draw(self, step: int, count: int) -> list[Drawn]:
        """The next prompts for ``step``; a step may draw several times, before the next one does."""
        while len(self._waiting) < count:
            epoch, indices = self.order.next()
            self._take([(epoch, index) for index in indices])
        drawn = [self._waiting.popleft() for _ in range(count)]
        own = self._steps.setdefault(step, _Step({}, {}, set()))
        own.order, own.unused = self.order.state_dict(), dict(self._unused)
        return drawn

    def _take(self, prompts: list[tuple[int, int]]) -> None:
        for epoch, index in prompts:
            drawn = Drawn(self._num_drawn, epoch, index)
            self._num_drawn += 1
            self._waiting.append(drawn)
            self._unused[drawn.serial] = drawn

    def settle(self, step: int, drawn: list[Drawn], used: Collection[int]) -> None:
        """Of ``drawn`` by ``step`` those at the positions ``used`` were; the others are the next to be drawn."""
        for position in used:
            self._unused.pop(drawn[position].serial)
            self._steps[step].used.add(drawn[position].serial)
        self._waiting.extendleft(one for i, one in reversed([*enumerate(drawn)]) if i not in used)

    def state_dict(self, step: int) -> dict[str, Any]:
        """Where the data stands once ``step`` steps are done, whatever has been drawn ahead since."""
        last = self._steps[step - 1]
        used = {serial for number, own in self._steps.items() if number < step for serial in own.used}
        returned = [[one.epoch, one.index] for serial, one in last.unused.items() if serial not in used]
        return last.order | ({"returned": returned} if returned else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue there; whatever was drawn since is forgotten.

        Raises:
            CheckpointError: it was taken with another order.
        """
        self.order.load_state_dict({name: value for name, value in state.items() if name != "returned"})
        self._waiting.clear(), self._unused.clear(), self._steps.clear()
        self._take([tuple(prompt) for prompt in state.get("returned", [])])

    def forget(self, step: int) -> None:
        """No state before the one after ``step`` will be asked for."""
        for number in [number for number in self._steps if number < step - self.max_ahead]:
            del self._steps[number]
