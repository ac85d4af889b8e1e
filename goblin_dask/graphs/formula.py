"""Formulas: text such as ``a * exp(-(x - mu)**2)`` that becomes a function of arrays.

The text is parsed with `ast` and never evaluated by Python: it is translated, node by node, into applications of the
catalogue's elementwise operators, and whatever is not one of them is refused. So a formula gives the same on blocks as
on whole arrays, and text from anywhere can be given to it. It means what the same text means in NumPy, whose own
functions and operators are called, so that NumPy arrays, Dask's, xarray's and the tracers of a recording all serve.
"""

from __future__ import annotations

import ast
import difflib
import keyword
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any

import numpy as np

from goblin_dask.errors import InputError
from goblin_dask.graphs.functions import SYNONYMS, functions
from goblin_dask.graphs.operators import CATALOGUE

LONGEST = 10_000
"""Characters of a formula."""
DEEPEST = 256
"""Levels of a formula's tree."""
LARGEST = 2**64
"""Bound of an integer constant's magnitude: no array has larger elements."""

CONSTANTS = {"pi": math.pi, "e": math.e, "inf": math.inf, "nan": math.nan}

_BINARY: dict[type, tuple[str, Callable[..., Any]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.FloorDiv: ("//", operator.floordiv),
    ast.Mod: ("%", operator.mod),
    ast.Pow: ("**", operator.pow),
    ast.BitAnd: ("&", operator.and_),
    ast.BitOr: ("|", operator.or_),
    ast.BitXor: ("^", operator.xor),
    ast.LShift: ("<<", operator.lshift),
    ast.RShift: (">>", operator.rshift),
}
_UNARY: dict[type, tuple[str, Callable[..., Any]]] = {
    ast.USub: ("-", operator.neg),
    ast.UAdd: ("+", operator.pos),
    ast.Invert: ("~", operator.invert),
}
_COMPARISONS: dict[type, tuple[str, Callable[..., Any]]] = {
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
    ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne),
}
_LOOSE = (ast.BitAnd, ast.BitOr, ast.BitXor)
"""They bind tighter than comparisons in Python, which hardly anybody means who leaves the parentheses out."""
_REFUSED: dict[type, str] = {
    ast.BoolOp: "'and' and 'or' do not work on arrays: write & and |, with parentheses around comparisons",
    ast.IfExp: "'if' does not work on arrays: write where(condition, a, b)",
    ast.Subscript: "arrays are not indexed in a formula: a formula is elementwise",
    ast.Attribute: "there are no attributes in a formula: write exp(x), not numpy.exp(x)",
    ast.Lambda: "lambda is a word of Python; a variable needs another name",
    ast.JoinedStr: "there is no text in a formula",
    ast.Tuple: "a formula has one result",
    ast.List: "there are no lists in a formula: give the array as a variable",
    ast.NamedExpr: "nothing is assigned in a formula",
    ast.Starred: "there is no * before an argument in a formula",
}

_PYTHON = (int, float, complex)


@dataclass(frozen=True, slots=True)
class _Step:
    """Take `arity` values off the stack, put one on it."""

    column: int
    what: str
    """For messages."""
    arity: int = 0
    apply: Callable[..., Any] | None = None
    """None for a variable, or a constant."""
    variable: bool = False
    value: Any = None


class _Fault(Exception):
    """What is wrong at a node."""


class Formula:
    """A function of arrays, element by element. Made by `formula`.

    Attributes
    ----------
    text : str
    names : tuple of str
        Its variables in the order in which they first appear, which is the order of positional arguments.
    """

    __name__ = "formula"

    def __init__(self, text: str) -> None:
        self.text = text
        self._steps = _translate(text)
        self.names = tuple(dict.fromkeys(step.what for step in self._steps if step.variable))
        if not self.names:
            raise InputError(f"the formula {_short(text)} names no array: it is a constant")
        self.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in self.names])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate.

        Parameters
        ----------
        *args, **kwargs
            The variables, in the order of `names` or by name: numbers, NumPy, Dask or xarray arrays.

        Raises
        ------
        InputError
            A variable that is missing, unknown or given twice, or that is no array of numbers; operands that do not fit
            together, with the column of what does not take them.
        """
        values = self._bind(args, kwargs)
        stack: list[Any] = []
        for step in self._steps:
            if step.variable:
                stack.append(values[step.what])
            elif step.apply is None:
                stack.append(step.value)
            else:
                operands = stack[len(stack) - step.arity :]
                del stack[len(stack) - step.arity :]
                try:
                    stack.append(step.apply(*operands))
                except InputError as error:
                    raise InputError(f"column {step.column}: {error}") from error
                except (TypeError, ValueError, ArithmeticError) as error:
                    given = " and ".join(map(_described, operands))
                    raise InputError(f"column {step.column}: {step.what} of {given}: {error}") from error
        return stack.pop()

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        listed = ", ".join(self.names)
        if len(args) > len(self.names):
            raise InputError(f"{len(args)} arrays for a formula of {len(self.names)} variables: {listed}")
        values = dict(zip(self.names, args, strict=False))
        for name, value in kwargs.items():
            if name not in self.names:
                raise InputError(f"the formula has no variable {name!r}; it has {listed}{_similar(name, self.names)}")
            if name in values:
                raise InputError(f"the variable {name!r} is given twice, by its place and by its name")
            values[name] = value
        missing = [name for name in self.names if name not in values]
        if missing:
            raise InputError(f"the formula needs {listed}; missing: {', '.join(missing)}")
        values = {name: _array(name, value) for name, value in values.items()}
        if all(isinstance(value, _PYTHON) for value in values.values()):
            return {name: np.asarray(value)[()] for name, value in values.items()}
        return values

    def __reduce__(self) -> Any:
        return (Formula, (self.text,))

    def __eq__(self, other: object) -> bool:
        return self.text == other.text if isinstance(other, Formula) else NotImplemented

    def __hash__(self) -> int:
        return hash((Formula, self.text))

    def __dask_tokenize__(self) -> tuple[str, str]:
        return ("goblin_dask.formula", self.text)

    def __repr__(self) -> str:
        return f"formula({self.text!r})"


def formula(text: str) -> Formula:
    """A function of arrays from the text of a formula.

    Parameters
    ----------
    text : str
        Python's arithmetic, comparisons (``0 < x < 1`` too), ``& | ^ ~ << >>``, the elementwise functions of the
        catalogue (docs/operators.md) and the constants ``pi``, ``e``, ``inf``, ``nan``, ``True``, ``False``. Every
        other name is a variable.

    Returns
    -------
    Formula
        To be called with NumPy, Dask or xarray arrays, or given to `dask.array.map_blocks` and
        `dask.array.apply_gufunc`.

    Raises
    ------
    InputError
        For anything else; the message has the column.

    Examples
    --------
    >>> gauss = formula("a * exp(-(x - mu)**2 / (2 * s**2))")
    >>> gauss.names
    ('a', 'x', 'mu', 's')
    >>> float(gauss(2.0, x=1.0, mu=1.0, s=3.0))
    2.0
    """
    if not isinstance(text, str):
        raise InputError(f"a formula is text, not {type(text).__name__}")
    return Formula(text)


# --- translation ------------------------------------------------------------------------------------------------
def _translate(text: str) -> tuple[_Step, ...]:
    if len(text) > LONGEST:
        raise InputError(f"a formula of {len(text)} characters; at most {LONGEST} are read")
    line = text.translate({ord(each): " " for each in "\r\n\t\f\v"})
    begin = len(line) - len(line.lstrip())
    line = line.strip()
    if not line:
        raise InputError("the formula is empty")
    if "#" in line:
        raise InputError(f"column {begin + line.index('#') + 1}: there are no comments in a formula")
    try:
        body = ast.parse(line, mode="eval").body
    except SyntaxError as error:
        column = begin + min(max(error.offset or 1, 1), len(line) + 1)
        reason = re.sub(r" \((<unknown>|detected at).*", "", str(error.msg))  # places in a file that there is not
        words = [word for word in re.findall(r"\w+", line) if keyword.iskeyword(word)]
        if words:
            reason += f"; {words[0]} is a word of Python, a variable needs another name"
        raise InputError(f"column {column}: {reason}, in the formula {_short(text)}") from error
    except (RecursionError, MemoryError) as error:
        raise InputError(f"the formula is nested more than {DEEPEST} levels deep") from error
    except ValueError as error:
        raise InputError(f"the formula {_short(text)} cannot be read: {error}") from error
    encoded = line.encode()

    def place(node: ast.expr) -> int:
        return begin + len(encoded[: node.col_offset].decode()) + 1

    steps: list[_Step] = []
    faults: list[tuple[int, str]] = []
    pending: list[tuple[ast.expr, int]] = [(body, 1)]
    while pending:  # from the right to the left, a node before its operands: backwards, it is the order to evaluate in
        node, depth = pending.pop()
        if depth > DEEPEST:
            raise InputError(f"the formula is nested more than {DEEPEST} levels deep")
        try:
            step, operands = _node(node, place(node), encoded)
        except _Fault as fault:
            faults.append((place(node), str(fault)))
            continue
        steps.append(step)
        pending.extend((operand, depth + 1) for operand in operands)
    if faults:
        column, reason = min(faults)
        raise InputError(f"column {column}: {reason}")
    return _folded(steps[::-1])


def _node(node: ast.expr, column: int, encoded: bytes) -> tuple[_Step, list[ast.expr]]:
    """A node's step, and the nodes of its operands."""
    match node:
        case ast.Name(id=name):
            if name in CONSTANTS:
                return _Step(column, name, value=CONSTANTS[name]), []
            return _Step(column, name, variable=True), []
        case ast.Constant(value=value):
            return _Step(column, "a constant", value=_constant(value)), []
        case ast.BinOp(left=left, op=op, right=right):
            if type(op) not in _BINARY:
                raise _Fault("there are no matrix products in a formula: a formula is elementwise")
            what, apply = _BINARY[type(op)]
            return _Step(column, what, 2, _arithmetic(apply)), [left, right]
        case ast.UnaryOp(op=op, operand=operand):
            if type(op) not in _UNARY:
                raise _Fault("'not' does not work on arrays: write ~, with parentheses around a comparison")
            what, apply = _UNARY[type(op)]
            return _Step(column, what, 1, _arithmetic(apply)), [operand]
        case ast.Compare(left=left, ops=ops, comparators=rest):
            return _comparison(column, ops, [left, *rest], encoded), [left, *rest]
        case ast.Call():
            return _call(node, column), list(node.args)
        case _:
            reason = _REFUSED.get(type(node))
            raise _Fault(reason or f"a formula has no such thing as Python's {type(node).__name__}")


def _constant(value: Any) -> Any:
    if isinstance(value, bool):
        return np.bool_(value)
    if type(value) not in _PYTHON:
        raise _Fault("there is no text in a formula" if isinstance(value, str | bytes) else f"{value!r} is no number")
    if isinstance(value, int):
        return _bounded(value)
    if not np.isfinite(value):
        raise _Fault("a number beyond the range of float64; write inf where infinity is meant")
    return value


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and abs(value) >= LARGEST:
        raise _Fault("an integer of more than 64 bits; write it as 1e30 where a floating-point number is meant")
    return value


def _arithmetic(apply: Callable[..., Any]) -> Callable[..., Any]:
    """An operator of Python, which on two numbers is not to run for years."""

    def bounded(*operands: Any) -> Any:
        if not all(type(each) in _PYTHON for each in operands):
            return apply(*operands)
        if apply in (operator.pow, operator.lshift) and all(type(each) is int for each in operands):
            base, exponent = operands
            bits = abs(base).bit_length() - 1
            if exponent > 64 and (apply is operator.lshift or bits > 0) and base:
                raise InputError("an integer of more than 64 bits; write a floating-point number")
        try:
            result = _bounded(apply(*operands))
        except _Fault as fault:
            raise InputError(str(fault)) from fault
        if isinstance(result, complex) and not any(isinstance(each, complex) for each in operands):
            raise InputError("the result is complex; add 0j to an operand where that is meant")
        return result

    return bounded


def _comparison(column: int, ops: list[ast.cmpop], operands: list[ast.expr], encoded: bytes) -> _Step:
    names, tests = [], []
    for op in ops:
        if type(op) not in _COMPARISONS:
            raise _Fault("'is' and 'in' do not work on arrays: write == or !=, and join with |")
        name, test = _COMPARISONS[type(op)]
        names.append(name)
        tests.append(test)
    for each in operands:
        if isinstance(each, ast.BinOp) and isinstance(each.op, _LOOSE) and not _parenthesised(each, encoded):
            raise _Fault(
                f"{_BINARY[type(each.op)][0]} binds tighter than the comparison beside it: write parentheses "
                "around one of them, as in (x > 0) & (y < 1)"
            )

    def compare(*values: Any) -> Any:
        result: Any = None
        for test, a, b in zip(tests, values, values[1:], strict=False):
            truth = test(a, b)
            truth = np.bool_(truth) if isinstance(truth, bool) else truth
            result = truth if result is None else np.logical_and(result, truth)
        return result

    return _Step(column, " ".join(names), len(operands), compare)


def _parenthesised(node: ast.expr, encoded: bytes) -> bool:
    before, after = encoded[: node.col_offset].rstrip(), encoded[node.end_col_offset :].lstrip()
    return before.endswith(b"(") and after.startswith(b")")


def _call(node: ast.Call, column: int) -> _Step:
    if not isinstance(node.func, ast.Name):
        kind = _REFUSED.get(type(node.func))
        raise _Fault(kind or "only a function's name can stand before parentheses")
    name = node.func.id
    known = functions()
    if name not in known:
        raise _Fault(_unknown(name, known))
    arity, function = known[name]
    if node.keywords:
        raise _Fault(f"{name} takes its arguments by their places, not by name")
    if len(node.args) != arity:
        raise _Fault(f"{name} takes {arity} argument{'s' * (arity != 1)}, got {len(node.args)}")
    return _Step(column, name, arity, function)


def _unknown(name: str, known: dict[str, Any]) -> str:
    if name in CATALOGUE:
        more = CATALOGUE[name].outputs != 1
        reason = "has several results" if more else "is not elementwise, or takes more than arrays"
        return f"{name} {reason}: a formula has one result, computed element by element"
    suggestion = f"; did you mean {SYNONYMS[name]}?" if SYNONYMS.get(name) in known else _similar(name, known)
    return f"there is no function {_short(name)}{suggestion}"


def _similar(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name[:40], list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""


def _folded(steps: list[_Step]) -> tuple[_Step, ...]:
    """Steps whose operands are all constants, done once and here, where their faults are found too."""
    done: list[list[_Step]] = []
    """Of each value on the stack: the steps that give it."""
    for step in steps:
        parts = done[len(done) - step.arity :]
        del done[len(done) - step.arity :]
        if step.apply is None or not all(len(part) == 1 and part[0].apply is None for part in parts):
            done.append([each for part in parts for each in part] + [step])
        elif any(part[0].variable for part in parts):
            done.append([*(part[0] for part in parts), step])
        else:
            try:
                with np.errstate(all="ignore"):
                    value = step.apply(*(part[0].value for part in parts))
            except (TypeError, ValueError, ArithmeticError) as error:
                raise InputError(f"column {step.column}: {step.what} of constants: {error}") from error
            value = value[()] if isinstance(value, np.ndarray) else value
            done.append([_Step(step.column, "a constant", value=value)])
    (result,) = done
    return tuple(result)


# --- arrays -----------------------------------------------------------------------------------------------------
def _array(name: str, value: Any) -> Any:
    if isinstance(value, bool):
        return np.bool_(value)
    if type(value) in _PYTHON or (hasattr(value, "__array_ufunc__") and not isinstance(value, np.ndarray | np.generic)):
        return value
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise InputError(f"the variable {name!r} is no array of numbers: {error}") from error
    if array.dtype.kind not in "biufcV" or array.dtype.names is not None:
        raise InputError(f"the variable {name!r} is {_short(value)}, expected numbers or an array of them")
    return value if isinstance(value, np.ndarray | np.generic) else array


def _described(value: Any) -> str:
    return f"{value.dtype} {value.shape}" if hasattr(value, "dtype") and hasattr(value, "shape") else _short(value)


def _short(value: Any) -> str:
    text = " ".join(repr(value[:61] if isinstance(value, str) else value).split())
    return text if len(text) <= 60 else text[:59] + "…"
