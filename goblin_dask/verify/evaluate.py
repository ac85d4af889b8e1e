"""Run parts of a program in the checker, as they are written or in another precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from goblin_dask.errors import InputError
from goblin_dask.graphs.operators import CREATION
from goblin_dask.graphs.program import Program
from goblin_dask.graphs.schedule import Step, schedule
from goblin_dask.verify.operands import Array

Source = Array | Callable[[], Array]

AS_IS: Mapping[str, str] = {}
DOUBLE: Mapping[str, str] = {
    "float16": "float64",
    "bfloat16": "float64",
    "float32": "float64",
    "complex64": "complex128",
}
"""Every float in double precision."""
SINGLE: Mapping[str, str] = {"float64": "float32", "complex128": "complex64"}
"""Every float in single precision, at most."""


def load(source: Source) -> Array:
    """An input that may be a function which reads it."""
    return np.asarray(source() if callable(source) else source)


def cast(array: Array, precision: Mapping[str, str]) -> Array:
    """An array in the dtype that a precision gives to its own; the array itself where that is none."""
    name = precision.get(array.dtype.name)
    return array if name is None else array.astype(name)


def apply(step: Step, operands: Sequence[Array], precision: Mapping[str, str] = AS_IS) -> tuple[Array, ...]:
    """Outputs of one node in some precision."""
    attributes: dict[str, Any] = dict(step.attributes)
    if step.operator.name not in CREATION and isinstance(attributes.get("dtype"), str):
        attributes["dtype"] = precision.get(attributes["dtype"], attributes["dtype"])
    try:
        with np.errstate(all="ignore"):
            outputs = step.operator.kernel(np, tuple(operands), attributes)
    except (TypeError, ValueError, IndexError, ArithmeticError, np.linalg.LinAlgError) as error:
        raise InputError(f"{step.operator.name} cannot be computed by the checker: {error}") from error
    return tuple(cast(np.asarray(value), precision) for value in outputs)


def needed(program: Program, values: Iterable[int]) -> list[int]:
    """Numbers of the steps that some values depend on, in order."""
    plan = schedule(program)
    owner = {value: number for number, step in enumerate(plan.steps) for value in step.outputs}
    found: set[int] = set()
    stack = [owner[v] for v in values if v in owner]
    while stack:
        number = stack.pop()
        if number not in found:
            found.add(number)
            stack.extend(owner[v] for v in plan.steps[number].operands if v in owner)
    return sorted(found)


def evaluate(
    program: Program, inputs: Sequence[Source], values: Sequence[int], precision: Mapping[str, str] = AS_IS
) -> tuple[Array, ...]:
    """Some values of a program, outputs or not.

    Parameters
    ----------
    values : sequence of int
        Their numbers in the program.
    precision : mapping
        Dtypes that are replaced.
    """
    plan, steps = schedule(program), needed(program, values)
    last = {operand: number for number in steps for operand in plan.steps[number].operands}
    known: dict[int, Array] = {}

    def read(value: int) -> Array:
        if value not in known:
            known[value] = cast(load(inputs[value]), precision)
        return known[value]

    for number in steps:
        step = plan.steps[number]
        outputs = apply(step, [read(operand) for operand in step.operands], precision)
        known.update(zip(step.outputs, outputs, strict=True))
        for operand in step.operands:
            if last[operand] == number and operand not in values:
                known.pop(operand, None)
    return tuple(read(value) for value in values)
