"""Unit tests, run on the response's code in a sandbox.

The reference answer holds the tests: Python text with assertions, or a JSON list of such texts and of
``{"input": text on stdin, "output": expected stdout}``.
"""

import asyncio
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_mp.config.reward import CodeTerm
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.rewards.base import Failure, Response, Setting, rewards
from rlhf_mp.rewards.sandbox import REFUSED, Limits, Sandbox

FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
HARNESS = """
def run():
    import os, sys
    passed = sys.stdin.readline()
    names = {{"__name__": "solution"}}
    exec(compile({solution!r}, "solution.py", "exec"), names)
    exec(compile({test!r}, "test.py", "exec"), names)
    sys.stdout.flush()
    os.write(1, passed.encode())
run()
"""
"""Prints what it was told only after the last assertion: a program that exits early has not passed."""


@dataclass(frozen=True)
class Check:
    """One run: a program, what it reads, and what the end of its output must be."""

    program: str
    stdin: str
    wanted: str
    whole: bool  # compare the whole output, not only its last line


@rewards.register("code")
class CodeReward:
    """1 if all tests pass, or the share of those that do. A program that fails, hangs or is stopped has not passed."""

    def __init__(self, term: CodeTerm, setting: Setting):
        self.term = term
        self._turns = asyncio.Semaphore(term.num_workers)
        limits = Limits(term.timeout_s, term.memory_mb, term.file_mb, term.max_processes)
        self._sandbox = Sandbox(term.isolation, limits)

    async def start(self) -> str:
        return await self._sandbox.start()

    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> Sequence[float | Failure]:
        try:
            tests = unit_tests(prompt.answer, split=self.term.partial)
        except ValueError as error:
            return [Failure("invalid", f"the reference answer holds no tests: {error}")] * len(responses)
        return await asyncio.gather(*(self._score(response.text, tests) for response in responses))

    async def _score(self, response: str, tests: Sequence[str | dict[str, str]]) -> float | Failure:
        solution = code_in(response)
        passed = 0
        for test in tests:
            outcome = await self._passes(check_of(solution, test))
            if isinstance(outcome, Failure):
                return outcome
            passed += outcome
            if not outcome and not self.term.partial:
                return 0.0
        return passed / len(tests)

    async def _passes(self, check: Check) -> bool | Failure:
        async with self._turns:
            outcome = await self._sandbox.run(check.program, check.stdin)
        if outcome.exit_code == REFUSED and outcome.errors.startswith("sandbox: "):
            return Failure("error", outcome.errors[:300])
        if outcome.exit_code != 0:
            return False
        found = outcome.output if check.whole else outcome.output.rpartition("\n")[2]
        return lines(found) == lines(check.wanted)

    async def close(self) -> None:
        pass  # every run ends by itself


def unit_tests(answer: str, *, split: bool) -> list[str | dict[str, str]]:
    """The tests of a reference answer; assertions are joined into one run unless each counts by itself.

    Raises:
        ValueError: there are none, or one of another form.
    """
    try:
        tests = json.loads(answer)
    except json.JSONDecodeError:
        tests = [answer]
    if not isinstance(tests, list) or not tests or tests == [""]:
        raise ValueError("neither Python text nor a JSON list of tests")
    for test in tests:
        if not isinstance(test, str) and not (isinstance(test, dict) and {"input", "output"} <= test.keys()):
            raise ValueError(f"{test!r:.80} is neither Python text nor has input and output")
    if split:
        return tests
    assertions = [test for test in tests if isinstance(test, str)]
    return [*(["\n".join(assertions)] if assertions else []), *(test for test in tests if isinstance(test, dict))]


def check_of(solution: str, test: str | dict[str, str]) -> Check:
    if isinstance(test, dict):
        return Check(solution, str(test["input"]), str(test["output"]), whole=True)
    token = secrets.token_hex(16)
    return Check(HARNESS.format(solution=solution, test=test), token, token, whole=False)


def code_in(response: str) -> str:
    """The last fenced block, else everything."""
    blocks = FENCE.findall(response)
    return blocks[-1] if blocks else response


def lines(text: str) -> list[str]:
    """Without white space at line ends and empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
