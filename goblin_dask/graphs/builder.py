"""`Builder`: how programs are made, node by node, with shapes known at once and equal expressions merged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from goblin_dask.errors import InputError, ProgramError
from goblin_dask.graphs.operators import CATALOGUE
from goblin_dask.graphs.operators.base import Specs
from goblin_dask.graphs.operators.creation import CONSTANT_LIMIT as CONSTANT_LIMIT
from goblin_dask.graphs.operators.dtypes import DTYPES, named
from goblin_dask.graphs.operators.rules import Attribute
from goblin_dask.graphs.order import canonical
from goblin_dask.graphs.program import Node, Program
from goblin_dask.messages import ArraySpec

Canonical = tuple[tuple[str, Attribute], ...]


class Builder:
    """A program in the making. Values are numbered in the order in which they are added, inputs and results alike.

    Examples
    --------
    >>> build = Builder()
    >>> x = build.input(ArraySpec((3,), "float32"))
    >>> (y,) = build.add("exp", [x])
    >>> program, slots = build.finish([y])
    """

    def __init__(self) -> None:
        self._specs: list[ArraySpec] = []
        self._origins: list[tuple[int, int]] = []
        """Of each value: (node, which of its outputs), or (-1, which input)."""
        self._nodes: list[Node] = []
        self._firsts: list[int] = []
        """Each node's first output."""
        self._inputs: list[int] = []
        self._known: dict[Any, tuple[int, ...]] = {}

    def input(self, spec: ArraySpec) -> int:
        """Declare an input; the value's number."""
        if spec.dtype not in DTYPES:
            raise InputError(f"no array of dtype {spec.dtype} is computed on volunteers; known are {', '.join(DTYPES)}")
        self._specs.append(spec)
        self._origins.append((-1, len(self._inputs)))
        self._inputs.append(len(self._specs) - 1)
        return len(self._specs) - 1

    def spec(self, value: int) -> ArraySpec:
        """Shape and dtype of a value."""
        return self._specs[value]

    def maker(self, value: int) -> tuple[str, tuple[int, ...]]:
        """Operator and operands of the node that makes a value; empty ones for an input."""
        node = self._origins[value][0]
        return (self._nodes[node].operator, self._nodes[node].operands) if node >= 0 else ("", ())

    def add(self, operator: str, operands: Sequence[int], /, **attributes: Any) -> tuple[int, ...]:
        """Apply an operator; the numbers of its outputs. An equal node that is there already is used again.

        Raises
        ------
        ProgramError
            Unknown operator or value, bad attribute.
        InputError
            Operands that do not fit together; the message has their shapes and dtypes.
        """
        operands = tuple(operands)
        specs = self._specs
        if operands and not 0 <= min(operands) <= max(operands) < len(specs):
            raise ProgramError(f"{operator} reads value {max(operands)} of {len(specs)}")
        read = tuple([specs[operand] for operand in operands])
        given, outputs = infer(operator, read, attributes)
        known_operator = CATALOGUE[operator]
        if known_operator.idle and outputs == read:
            return operands
        key = (operator, operands, given if known_operator.cached else repr(given))
        known = self._known.get(key)
        if known is None:
            first = len(specs)
            known = tuple(range(first, first + len(outputs)))
            self._known[key] = known
            self._firsts.append(first)
            self._origins.extend((len(self._nodes), i) for i in range(len(outputs)))
            self._nodes.append(Node(operator, operands, given))
            specs.extend(outputs)
        return known

    def constant(self, value: Any, dtype: Any = None) -> int:
        """A scalar or small array that is part of the program.

        Raises
        ------
        InputError
            When it has more than `CONSTANT_LIMIT` bytes or is no array of numbers.
        """
        array = np.asarray(value, dtype)
        name = named(array.dtype)
        if array.nbytes > CONSTANT_LIMIT:
            raise InputError(
                f"a constant of {array.nbytes} bytes, at most {CONSTANT_LIMIT} are allowed: make it an input"
            )
        return self.add("constant", (), data=array.tobytes().hex(), dtype=name, shape=array.shape)[0]

    def finish(self, outputs: Iterable[int]) -> tuple[Program, tuple[int, ...]]:
        """The canonical program of some values, and which declared input each of its slots is.

        Nodes that no output needs are left out, and so are inputs. Each declared input that is needed has exactly one
        slot, however often it is read; who wants a slot for each occurrence declares each occurrence.
        """
        wanted = tuple(outputs)
        if not wanted:
            raise ProgramError("a program without outputs computes nothing")
        if not 0 <= min(wanted) <= max(wanted) < len(self._specs):
            raise ProgramError(f"output {max(wanted)} is none of the {len(self._specs)} values")
        return canonical(self._specs, self._origins, self._nodes, self._firsts, self._inputs, wanted)


def infer(operator: str, specs: Specs, attributes: dict[str, Any]) -> tuple[Canonical, Specs]:
    """Canonical attributes of an application of an operator, and the specs of its outputs.

    Raises
    ------
    ProgramError, InputError
        As `Builder.add`.
    """
    known = CATALOGUE.get(operator)
    if known is None:
        raise ProgramError(f"unknown operator {operator!r}")
    if known.cached:
        try:
            return _infer(operator, specs, tuple(attributes.items()))
        except TypeError:  # attributes that cannot be hashed: lists
            pass
    given = known.canonical(specs, attributes)
    return given, known.outputs_of(specs, given)


@lru_cache(maxsize=16384)
def _infer(operator: str, specs: Specs, attributes: tuple[tuple[str, Any], ...]) -> tuple[Canonical, Specs]:
    known = CATALOGUE[operator]
    given = known.canonical(specs, dict(attributes))
    return given, known.outputs_of(specs, given)
