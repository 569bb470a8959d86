"""A question and a calculator: a turn that starts with "?" is worked out, any other turn is the final answer."""

import ast
import operator
from collections.abc import Callable

from rlhf_mp.data.prompts import Prompt
from rlhf_mp.environments.base import Turn, environments

OPERATIONS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
MAX_LENGTH = 64  # characters: no product of such a text is long to work out


@environments.register("calculator")
class Calculator:
    """Pays 1 for the reference answer."""

    async def reset(self, prompt: Prompt) -> str:
        self._answer = prompt.answer.strip()
        return ""

    async def step(self, response: str) -> Turn:
        said = response.strip()
        if said.startswith("?"):
            return Turn(observation=f"={worked_out(said[1:])};")
        return Turn(reward=float(said == self._answer), done=True)


def worked_out(expression: str) -> str:
    """The value of sums, differences and products of whole numbers; "!" for anything else."""
    try:
        if len(expression) > MAX_LENGTH:
            raise ValueError
        return str(value(ast.parse(expression.strip(), mode="eval").body))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return "!"


def value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](value(node.left), value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value(node.operand)
    raise ValueError("neither a whole number nor an operation")
