"""For which sizes of the batch a recorded graph holds: what PyTorch took for granted while it recorded.

A program that asks ``x.shape[0] > 3``, or cuts its batch into pairs, is recorded as it runs for the example. What it
asked stands beside the graph as conditions, in Python, on ``n``, the size of the batch.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.USub: operator.neg,
    ast.Not: operator.not_, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "float": float, "int": int, "max": max, "min": min, "math.ceil": math.ceil, "math.floor": math.floor,
    "math.sqrt": math.sqrt, "math.trunc": math.trunc, "torch.sym_float": float, "torch.sym_int": int,
    "torch.sym_max": max, "torch.sym_min": min,
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """The sizes for which a graph holds."""

    recorded: int
    """The example's, which is two or more: of batches of one and of none PyTorch takes no account."""
    conditions: tuple[str, ...] = ()

    def broken(self, size: int) -> str | None:
        """The first condition that a size does not keep; None where it keeps all.

        A condition that is not understood is taken for broken, except for the size that was recorded.
        """
        if size == self.recorded:
            return None
        return next((each for each in self.conditions if not holds(each, size)), None)

    def hold(self, size: int) -> bool:
        """Whether the graph holds for a size beyond doubt."""
        return size >= 2 and self.broken(size) is None


def holds(condition: str, n: int) -> bool:
    """Whether a condition holds for a size; not, where it has no value or is not understood."""
    try:
        return bool(_value(ast.parse(condition, mode="eval").body, n))
    except (ArithmeticError, ValueError, KeyError, SyntaxError):
        return False


def _value(node: ast.expr, n: int) -> Any:
    """Of an expression in `n`.

    Raises
    ------
    KeyError
        For what no condition is known to have.
    """
    match node:
        case ast.Constant(int() | float() as number):
            return number
        case ast.Name("n"):
            return n
        case ast.UnaryOp(op, operand):
            return OPERATORS[type(op)](_value(operand, n))
        case ast.BinOp(left, op, right):
            return OPERATORS[type(op)](_value(left, n), _value(right, n))
        case ast.BoolOp(op, values):
            return (all if isinstance(op, ast.And) else any)(_value(each, n) for each in values)
        case ast.Compare(left, [op], [right]):
            return OPERATORS[type(op)](_value(left, n), _value(right, n))
        case ast.Call(function, arguments, []):
            return FUNCTIONS[ast.unparse(function)](*(_value(each, n) for each in arguments))
    raise KeyError(ast.unparse(node))
