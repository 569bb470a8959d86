"""1 for a mathematically equal final answer, else 0; equality is decided by math-verify in a process of its own."""

import asyncio
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from rlhf_mp.config.schema import RewardConfig
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.rewards.base import rewards
from rlhf_mp.rewards.math_worker import MathWorker, WorkerDied

BOXED = "\\boxed{"
BRACE = re.compile(r"\\boxed\{|\\.|[{}]", re.DOTALL)  # an escaped brace is a character of the answer
WORD = re.compile(r"\s[A-Za-z]{2}")


@rewards.register("math")
class MathReward:
    """Compares final answers. A response whose comparison passes the deadline counts 0 and in ``num_timeouts``."""

    def __init__(self, config: RewardConfig):
        self.num_timeouts = 0
        self._timeout_s = config.timeout_s
        self._worker: MathWorker | None = None  # started by the first comparison
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="math-reward")

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[float]:
        in_thread = asyncio.get_running_loop().run_in_executor
        return await asyncio.gather(*(in_thread(self._thread, self._score, prompt.answer, r) for r in responses))

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)  # waits for the comparison under way, timeout_s at most
        if self._worker:
            self._worker.close()

    def _score(self, answer: str, response: str) -> float:
        gold = final_answer(answer) or as_written(answer)
        final = final_answer(response)
        if not gold.text or (final and not final.text):
            return 0.0
        if final and final.text == gold.text:
            return 1.0
        if self._worker is None:
            self._worker = MathWorker(self._timeout_s)
        try:
            # Without a marked answer math-verify takes the last number or expression of the whole response.
            return float(self._worker.matches(gold.expression, final.expression if final else response))
        except WorkerDied:
            self._worker = None
            self.num_timeouts += 1
            return 0.0


class FinalAnswer(NamedTuple):
    text: str
    expression: str  # what math-verify parses


def final_answer(text: str) -> FinalAnswer | None:
    """What is in the last ``\\boxed{}``, else on the line of the last ``####`` (GSM8K); None without either."""
    boxed = last_boxed(text)
    if boxed is not None:
        return FinalAnswer(boxed.strip(), f"{BOXED}{boxed}}}")
    _, marker, after = text.rpartition("####")
    return as_written(after.partition("\n")[0]) if marker else None


def as_written(line: str) -> FinalAnswer:
    """An answer that is LaTeX, or else prose ("72 clips"), in which math-verify looks for the last number."""
    text = line.strip().rstrip(".")
    is_prose = WORD.search(text) and "\\" not in text
    return FinalAnswer(text, text if is_prose else f"{BOXED}{text}}}")


def last_boxed(text: str) -> str | None:
    """The content of the last complete ``\\boxed{...}``, nested braces included. Linear in the length of ``text``."""
    open_braces: list[int | None] = []  # where the content of a box starts; None: some other brace
    start, last = -1, None
    for brace in BRACE.finditer(text):
        if brace[0] == BOXED:
            open_braces.append(brace.end())
        elif brace[0] == "{":
            open_braces.append(None)
        elif brace[0] == "}" and open_braces:
            opened = open_braces.pop()
            if opened is not None and opened > start:
                start, last = opened, text[opened : brace.start()]
    return last
