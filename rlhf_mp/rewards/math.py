"""1 for a mathematically equal final answer, else 0; equality is decided by math-verify in a process of its own."""

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rlhf_mp.config.reward import MathTerm
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.rewards.base import Failure, Response, Setting, rewards
from rlhf_mp.rewards.worker import WorkerDied, WorkerPool, WorkFailed

BOXED = "\\boxed{"
BRACE = re.compile(r"\\boxed\{|\\.|[{}]", re.DOTALL)  # an escaped brace is a character of the answer
WORD = re.compile(r"\s[A-Za-z]{2}")
ANSWER_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
MARKDOWN = re.compile(r"\*\*|__|`")
MIXED = re.compile(r"([-+]?)(\d+)\s+(\d+)\s*/\s*(\d+)")  # 1 1/2
NUMBER = re.compile(r"[$€£]?\s*[-+]?[$€£]?\d[\d.,]*(?:\s*/\s*\d+)?\s*%?")
UNIT = re.compile(r"\s[A-Za-z°][\w°²³^/*.]*$")  # the one-letter units; of longer words math-verify takes care


@rewards.register("math")
class MathReward:
    """Compares final answers, one at a time in each worker."""

    def __init__(self, term: MathTerm, setting: Setting):
        self._pool = WorkerPool(comparison, size=term.num_workers, timeout_s=term.timeout_s, memory_mb=term.memory_mb)

    async def start(self) -> str:
        await self._pool.start("math")
        return ""

    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> Sequence[float | Failure]:
        return await asyncio.gather(*(self._score(prompt.answer, response.text) for response in responses))

    async def close(self) -> None:
        await asyncio.to_thread(self._pool.close)

    async def _score(self, answer: str, response: str) -> float | Failure:
        gold = final_answer(answer) or as_written(answer)
        final = final_answer(response)
        if not gold.text or (final and not final.text):
            return 0.0
        if final and final.text == gold.text:
            return 1.0
        if final and NUMBER.fullmatch(gold.text):
            final = without_unit(final)
        try:
            # Without a marked answer math-verify takes the last number or expression of the whole response.
            return float(await self._pool.call(gold.expression, final.expression if final else response))
        except WorkerDied as death:
            return Failure(death.kind, str(death))
        except WorkFailed as error:
            return Failure("error", str(error))


def comparison() -> Callable[[str, str], bool]:
    """In the worker: whether math-verify reads an expression in the second text that equals the one in the first."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time-outs are off

    def equal(gold: str, response: str) -> bool:
        gold, response = (parse(text, parsing_timeout=None) for text in (gold, response))
        return bool(verify(gold, response, timeout_seconds=None))

    return equal


class FinalAnswer(NamedTuple):
    text: str
    expression: str  # what math-verify parses


def final_answer(text: str) -> FinalAnswer | None:
    """What is in the last ``\\boxed{}``, else on the last ``####``'s line (GSM8K), else in the last ``<answer>``."""
    boxed = last_boxed(text)
    if boxed is not None:
        return FinalAnswer(boxed.strip(), f"{BOXED}{boxed}}}")
    _, marker, after = text.rpartition("####")
    if marker:
        return as_written(after.partition("\n")[0])
    tagged = ANSWER_TAG.findall(text)
    return as_written(tagged[-1]) if tagged else None


def as_written(line: str) -> FinalAnswer:
    """An answer that is LaTeX, or else prose ("72 clips"), in which math-verify looks for the last number."""
    text = MARKDOWN.sub("", line).strip().rstrip(".")
    if mixed := MIXED.fullmatch(text):
        sign, whole, above, below = mixed.groups()
        return FinalAnswer(text, f"{BOXED}{sign}{whole}\\frac{{{above}}}{{{below}}}}}")
    is_prose = WORD.search(text) and "\\" not in text
    return FinalAnswer(text, text if is_prose else f"{BOXED}{text}}}")


def without_unit(final: FinalAnswer) -> FinalAnswer:
    """ "12 m^2" as "12": where the reference is a number, a letter after a number is no variable."""
    bare = UNIT.sub("", final.text)
    return FinalAnswer(bare, f"{BOXED}{bare}}}") if bare != final.text and NUMBER.fullmatch(bare) else final


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
