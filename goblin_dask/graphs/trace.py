"""`trace`: a function of arrays becomes a program."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from goblin_dask.errors import NotTraceable
from goblin_dask.graphs.capture.pytree import Leaf, flatten, is_array, is_constant, map_tree
from goblin_dask.graphs.program import Program
from goblin_dask.graphs.tracer import dispatch, linear, making, ordering, shaping
from goblin_dask.graphs.tracer.array import Tracer
from goblin_dask.graphs.tracer.recorder import recording
from goblin_dask.messages import ArraySpec

_RULES = (linear, making, ordering, shaping)
"""Imported for the rules that they register."""


Route = Callable[[Any], Any]
"""From a function, or a tree of constants, to what a traced function sees in its place."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A function, as a program."""

    program: Program | None
    """None when nothing is computed: the result is made of operands and constants as they are."""
    slots: tuple[tuple[str, Any], ...]
    """Of each input: ``("operand", number)``, ``("literal", number)``, or ``("found", array)``: an array that the
    function found in its closure or made of constants. Without a program: of each leaf of `tree`."""
    tree: Any
    """The result: `Leaf`s number outputs of the program."""
    baked: frozenset[int]
    """Literals whose values the function looked at: the program holds for these alone."""
    specs: Any
    """The result with the outputs' specs in the places of the leaves."""


def trace(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Traced:
    """Record a function.

    Parameters
    ----------
    function : callable
    args, kwargs
        Its arguments: trees with an `ArraySpec` in the place of each operand. Arrays in them are literals. Both are
        numbered in their order.

    Raises
    ------
    NotTraceable
        When the function cannot be recorded. The message says why.
    """
    operands, skeleton = flatten((args, kwargs or {}), lambda value: isinstance(value, ArraySpec))
    literals: list[Any] = []

    def evaluate(route: Route, given: list[Any], known: list[Any]) -> Any:
        numbers = iter(range(len(known)))

        def fill(value: Any) -> Any:
            if isinstance(value, Leaf):
                return given[value.index]
            if is_array(value) and isinstance(value, np.ndarray):
                return known[next(numbers)]
            return route(value) if callable(value) else value

        positional, named = map_tree(fill, skeleton)
        return route(function)(*positional, **named)

    map_tree(
        lambda value: literals.append(value) if is_array(value) and isinstance(value, np.ndarray) else None, skeleton
    )
    return record(evaluate, operands, literals)


def record(
    evaluate: Callable[[Route, list[Any], list[Any]], Any],
    operands: Sequence[Any],
    literals: Sequence[Any],
    *,
    inputs: bool = True,
) -> Traced:
    """Record what `evaluate` does.

    Parameters
    ----------
    evaluate : callable
        Of the route that every function it calls must be taken through, the operands and the literals.
    operands : sequence of tree
        With an `ArraySpec` in the place of each array; the arrays are numbered throughout.
    literals : sequence of numpy.ndarray
        Arrays that are known now.
    inputs : bool
        Whether literals become inputs of the program. Else those that it reads are part of it, and it holds for them
        alone.
    """
    rebind = dispatch.rebinding()
    with recording(rebind) as recorder:
        count = itertools.count()

        def operand(value: Any) -> Any:
            if isinstance(value, ArraySpec):
                return Tracer(recorder.operand(next(count), value), value)
            return value

        given = [map_tree(operand, tree) for tree in operands]
        known = [Tracer.of(array, frozenset({i}), i if inputs else None) for i, array in enumerate(literals)]
        try:
            return _finish(recorder, evaluate(rebind, given, known))
        except NotTraceable:
            raise
        except RecursionError as error:
            raise NotTraceable("the recording does not end") from error
        except Exception as error:
            raise NotTraceable(f"recording raised {type(error).__name__}: {error}") from error


def _finish(recorder: Any, result: Any) -> Traced:
    leaves, tree = flatten(result, lambda value: isinstance(value, Tracer))
    _check_constants(tree)
    builder = recorder.builder
    values = [leaf.value for leaf in leaves]
    specs_of_values = [builder.spec(value) for value in values]

    def spec(value: Any) -> Any:
        return specs_of_values[value.index] if isinstance(value, Leaf) else value

    specs = map_tree(spec, tree)
    baked = frozenset(recorder.baked)
    if not values:
        return Traced(None, (), tree, baked, specs)
    program, slots = builder.finish(values)
    if not program.nodes:
        origins = tuple(recorder.slots[slots[output]] for output in program.outputs)
        return Traced(None, origins, tree, baked, specs)
    return Traced(program, tuple(recorder.slots[slot] for slot in slots), tree, baked, specs)


def _check_constants(tree: Any) -> None:
    def check(value: Any) -> None:
        if isinstance(value, np.ndarray):
            raise NotTraceable("the function returns an array that it made by itself")
        if not (isinstance(value, (Leaf, np.generic)) or is_constant(value)):
            raise NotTraceable(f"the function returns a {type(value).__name__}")

    map_tree(check, tree)
