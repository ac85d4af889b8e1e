"""A round as one Dask graph: micro-batches are programs for volunteers, whose results are summed in the laboratory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from dask.delayed import Delayed

from goblin_dask.errors import NotTraceable
from goblin_dask.graphs.apply import applies_operators
from goblin_dask.graphs.capture.folds import Fold
from goblin_dask.graphs.execute import execute
from goblin_dask.graphs.program import Program
from goblin_dask.graphs.tracer.array import Tracer
from goblin_dask.graphs.tracer.recorder import ops

Array = np.ndarray[Any, Any]


class Evaluates:
    """A program as a function of its inputs, which gives a tuple of its outputs; lowered, it is the program again."""

    applies_operators = True

    def __init__(self, program: Program):
        self.program = program

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        program = self.program
        if not any(isinstance(each, Tracer) for each in inputs):
            return tuple(execute(program, [np.asarray(each) for each in inputs]))
        values: list[Any] = list(inputs)
        for node in program.nodes:
            values.extend(ops(node.operator, *(values[each] for each in node.operands), **dict(node.attributes)))
        return tuple(values[output] for output in program.outputs)


@applies_operators
def picked(results: Any, number: int) -> Any:
    """One of the results of a program."""
    return results[number]


class Sums:
    """Adds the results of the next micro-batch to what came before; sums of few numbers are kept in float64.

    It runs in the laboratory, on results that were accepted, and always in the order of the micro-batches: what comes
    out does not depend on who computed what, nor when.

    Parameters
    ----------
    wide : int
        How many of the first results, sums and counts, are scalars that are added in float64.
    folds : sequence of Fold or None
        Of the last results: how buffers take them up; None where the result is the buffer.
    """

    def __init__(self, wide: int, folds: Sequence[Fold | None] = ()):
        self.wide, self.folds = wide, tuple(folds)

    def __call__(self, before: Sequence[Any], found: Sequence[Any]) -> tuple[Any, ...]:
        if any(isinstance(each, Tracer) for each in (*before, *found)):
            raise NotTraceable("sums over micro-batches are made in the laboratory, in their order")
        count = len(found) - len(self.folds)
        sums: list[Any] = []
        for number, new in enumerate(found[:count]):
            new = np.asarray(new, np.float64) if number < self.wide else np.asarray(new)
            sums.append(new if number >= len(before) - len(self.folds) else np.asarray(before[number] + new))
        kept = before[len(before) - len(self.folds) :]
        for fold, buffer, new in zip(self.folds, kept, found[count:], strict=True):
            sums.append(np.asarray(new) if fold is None else fold(np.asarray(buffer), np.asarray(new)))
        return tuple(sums)


@dataclass(frozen=True)
class Part:
    """A micro-batch."""

    program: Program
    inputs: tuple[Any, ...]
    """Of the program: arrays, or names of those that the parts share."""
    handed: tuple[tuple[str, int], ...] = ()
    """Shared arrays that the next part reads in the place of the earlier one: name, and number of the result."""


def summed(parts: Sequence[Part], shared: Mapping[str, Array], sums: Sums, buffers: Sequence[Array] = ()) -> Delayed:
    """The sum over parts, lazily: a tuple of arrays.

    Parameters
    ----------
    parts : sequence of Part
    shared : mapping of str to array
        Parameters and buffers, each of which is one blob.
    sums : Sums
    buffers : sequence of array
        What the folds start from.
    """
    graph: dict[Any, Any] = {f"shared-{name}": array for name, array in shared.items()}
    names = {name: f"shared-{name}" for name in shared}
    functions: dict[int, Evaluates] = {}
    graph["sum-0"] = tuple(np.asarray(each) for each in buffers)
    for number, part in enumerate(parts):
        function = functions.setdefault(id(part.program), Evaluates(part.program))
        operands = []
        for place, given in enumerate(part.inputs):
            if isinstance(given, str):
                operands.append(names[given])
            else:
                operands.append(f"input-{number}-{place}")
                graph[operands[-1]] = given
        graph[f"part-{number}"] = (function, *operands)
        for name, result in part.handed:
            names[name] = f"state-{number}-{name}"
            graph[names[name]] = (picked, f"part-{number}", result)
        graph[f"sum-{number + 1}"] = (sums, f"sum-{number}", f"part-{number}")
    return Delayed(f"sum-{len(parts)}", graph)
