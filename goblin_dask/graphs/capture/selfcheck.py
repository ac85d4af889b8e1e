"""The self-check of a template: the task's own function and the program, on the same data.

A function that draws random numbers by a way that tracing does not see, that asks ``isinstance(x, numpy.ndarray)``, or
writes into a view, traces without an error and wrongly. So nothing traced is trusted before both have given the same
on different sets of data, bit for bit where no floating-point numbers are summed.

Where numbers are summed, an order of summation is as good as another. How far apart honest results may be is then
measured: a computed sum is the exact sum of terms each of which was changed by at most n·u (n terms, u the unit
roundoff), so the function is run once more on operands changed by as much.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from goblin_dask.errors import GoblinError
from goblin_dask.graphs.capture.pytree import Leaf, flatten, is_array, map_tree, unflatten
from goblin_dask.graphs.check import specs
from goblin_dask.graphs.execute import execute
from goblin_dask.graphs.operators import CATALOGUE
from goblin_dask.graphs.operators.base import Kind
from goblin_dask.graphs.program import Program
from goblin_dask.graphs.trace import Traced
from goblin_dask.messages import ArraySpec

SUMMING = {Kind.REDUCTION, Kind.CUMULATIVE, Kind.CONTRACTION, Kind.LINALG, Kind.FFT}
EXACT = frozenset(
    [
        "max",
        "min",
        "all",
        "any",
        "argmax",
        "argmin",
        "nanargmax",
        "nanargmin",
        "nanmax",
        "nanmin",
        "cumulative_max",
        "cumulative_min",
        "count_nonzero",
    ]
)
"""Reductions that round nothing."""
SLACK = 4.0
"""Factor on the measured distance between honest results."""

Call = Callable[[list[Any], list[Any]], Any]
"""The task's function, of its operands (trees) and literals."""


class Undecided(Exception):
    """The function raises on all data that the check can think of."""


class _Skip(Exception):
    """This draw says nothing."""


class Different(Exception):
    """The program does not do what the function does."""


def confirm(call: Call, operands: Sequence[Any], literals: Sequence[Any], traced: Traced, seed: int = 0) -> Any:
    """Compare a task with its program on drawn data.

    Parameters
    ----------
    call : callable
    operands : sequence of tree
        With an `ArraySpec` in the place of each array.
    literals : sequence of numpy.ndarray
    traced : Traced

    Returns
    -------
    tree
        The traced one, its leaves marked where the function returns NumPy scalars.

    Raises
    ------
    Different, Undecided
    """
    leaves, skeleton = flatten(list(operands), lambda value: isinstance(value, ArraySpec))
    agreed, tree, errors = 0, None, []
    for draw in _draws(leaves, np.random.default_rng(seed), _looks_for_nan(traced.program)):
        try:
            wanted = _quietly(call, unflatten(skeleton, [each.copy() for each in draw]), list(literals))
        except GoblinError:
            raise
        except Exception as error:  # the researcher's function may raise anything
            errors.append(error)
            continue
        try:
            tree = _agree(call, skeleton, draw, literals, traced, wanted, tree)
        except _Skip:
            continue
        agreed += 1
        if agreed == (3 if _looks_for_nan(traced.program) else 2):
            return tree
    if agreed >= 2:
        return tree
    why = f"the function raises {type(errors[0]).__name__}: {errors[0]}" if errors else "no data fit its bins"
    raise Undecided(why)


def confirm_on(call: Call, operands: Sequence[Any], literals: Sequence[Any], traced: Traced) -> Any:
    """`confirm` on the task's real operands, for a function that raises on drawn data."""
    leaves, skeleton = flatten(list(operands), is_array)
    draw = [np.asarray(each) for each in leaves]
    wanted = _quietly(call, unflatten(skeleton, [each.copy() for each in draw]), list(literals))
    return _agree(call, skeleton, draw, literals, traced, wanted, None)


def _agree(
    call: Call, skeleton: Any, draw: list[Any], literals: Sequence[Any], traced: Traced, wanted: Any, before: Any
) -> Any:
    program = traced.program
    inputs = [
        draw[what] if kind == "operand" else literals[what] if kind == "literal" else what
        for kind, what in traced.slots
    ]
    try:
        got = list(execute(program, inputs)) if program is not None else inputs
    except GoblinError as error:
        if program is not None and any(node.operator == "bincount" for node in program.nodes):
            raise _Skip from error  # it raises for what does not fit into the bins that were declared
        raise Different(f"the program raises where the function does not: {error}") from error
    found, shape = flatten(_fields(wanted), is_array)
    if not _same_tree(shape, traced.tree):
        raise Different("the function returns another structure than its recording, or constants of other values")
    if before is not None and _leaves(shape) != _leaves(before):
        raise Different("the function returns scalars on some data and arrays on other")
    order = [leaf.index for leaf in flatten(traced.tree, lambda value: isinstance(value, Leaf))[0]]
    perturbed: list[Any] | None = None
    summing = program is not None and any(_sums(node.operator) for node in program.nodes)
    for place, (number, array) in enumerate(zip(order, found, strict=True)):
        result = got[number]
        if result.dtype != array.dtype or result.shape != array.shape:
            raise Different(
                f"the function returns {array.dtype} {array.shape}, its recording says {result.dtype} {result.shape}"
            )
        if _identical(np.asarray(array), result):
            continue
        if not summing or array.dtype.kind not in "fc" or program is None:
            raise Different("the function and its recording give different results")
        terms, roundoff = _terms(program)
        if perturbed is None:
            changed = [_changed(each, terms * roundoff) for each in draw]
            perturbed = flatten(_fields(_quietly(call, unflatten(skeleton, changed), list(literals))), is_array)[0]
        if not _near(np.asarray(array), result, np.asarray(perturbed[place]), terms * roundoff):
            raise Different("the function and its recording differ by more than rounding explains")
    return shape


def _leaves(tree: Any) -> list[Any]:
    return flatten(tree, lambda value: isinstance(value, Leaf))[0]


def _near(wanted: Any, result: Any, perturbed: Any, relative: float) -> bool:
    if not np.array_equal(np.isfinite(wanted), np.isfinite(result)):
        return False
    finite = np.isfinite(wanted)
    if not _identical(wanted[~finite], result[~finite]):
        return False
    wanted, result, perturbed = (
        each[finite].astype(np.result_type(each, np.float64)) for each in (wanted, result, perturbed)
    )
    moved = np.abs(perturbed - wanted)
    moved = moved[np.isfinite(moved)]
    allowed = SLACK * (moved.max(initial=0.0) + relative * np.abs(wanted).max(initial=0.0))
    return bool(np.abs(result - wanted).max(initial=0.0) <= allowed)


def _identical(a: Any, b: Any) -> bool:
    """Bit for bit, but for the bits of NaN."""
    if a.dtype.kind in "fc":
        same = np.array_equal(a, b, equal_nan=True)
        return same and np.array_equal(np.signbit(a.real) & (a.real == 0), np.signbit(b.real) & (b.real == 0))
    return np.array_equal(a, b)


def _fields(tree: Any) -> Any:
    """Structured arrays as dicts: Dask's argument reductions return either, by what the array type knows."""

    def split(value: Any) -> Any:
        if isinstance(value, (np.ndarray, np.void)) and value.dtype.names:
            return {name: value[name] for name in value.dtype.names}
        return value

    return map_tree(split, tree)


def _same_tree(a: Any, b: Any) -> bool:
    if isinstance(a, Leaf) or isinstance(b, Leaf):
        return isinstance(a, Leaf) and isinstance(b, Leaf)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same_tree(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same_tree, a, b))
    return a is b or repr(a) == repr(b)


def _quietly(call: Call, operands: list[Any], literals: list[Any]) -> Any:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return call(operands, [each.copy() for each in literals])


# --- data -------------------------------------------------------------------------------------------------------
def _draws(leaves: list[ArraySpec], random: np.random.Generator, nan: bool) -> Iterator[list[Any]]:
    lengths = [size for spec in leaves for size in spec.shape]
    smallest = min([size for size in lengths if size], default=2)
    yield [_draw(spec, random, 0, max(1, min(smallest, 8)), -2.0, 2.0) for spec in leaves]
    yield [_draw(spec, random, -4, 100, 0.0, 1.0) for spec in leaves]
    if nan:
        yield [_with_nan(_draw(spec, random, 0, max(1, min(smallest, 8)), -1.0, 1.0), random) for spec in leaves]
    yield [_draw(spec, random, 0, max(1, min(smallest, 8)), 0.0, 1.0) for spec in leaves]
    for _ in range(2):
        yield [_definite(spec, random) for spec in leaves]
    yield [_draw(spec, random, 0, 2, 0.5, 1.0) for spec in leaves]
    yield [_draw(spec, random, 0, 1, 1.0, 2.0) for spec in leaves]


def _draw(spec: ArraySpec, random: np.random.Generator, low: int, high: int, least: float, most: float) -> Any:
    return np.asarray(_drawn(spec, random, low, high, least, most), spec.dtype)


def _drawn(spec: ArraySpec, random: np.random.Generator, low: int, high: int, least: float, most: float) -> Any:
    dtype = np.dtype(spec.dtype)
    if dtype.kind == "b":
        return random.integers(0, 2, spec.shape)
    if dtype.kind in "iu":
        return random.integers(max(low, 0) if dtype.kind == "u" else low, high, spec.shape)
    values = random.random(spec.shape) * (most - least) + least
    if dtype.kind == "c":
        return values + 1j * (random.random(spec.shape) * (most - least) + least)
    return values


def _with_nan(array: Any, random: np.random.Generator) -> Any:
    if array.dtype.kind in "fc":
        array = np.asarray(np.where(random.random(array.shape) < 0.2, array.dtype.type(np.nan), array))
    return array


def _definite(spec: ArraySpec, random: np.random.Generator) -> Any:
    """Symmetric positive definite where square."""
    array = _draw(spec, random, 0, 2, 0.0, 1.0)
    if array.ndim >= 2 and array.shape[-1] == array.shape[-2] and array.dtype.kind in "fc":
        n = array.shape[-1]
        array = (array + np.swapaxes(array.conj(), -1, -2)) / 2 + n * np.eye(n)
    return np.asarray(array, spec.dtype)


def _changed(array: Any, relative: float) -> Any:
    if array.dtype.kind not in "fc":
        return array.copy()
    signs = np.random.default_rng(1).integers(0, 2, array.shape) * 2.0 - 1.0
    return np.asarray(array * (1 + relative * signs), array.dtype)


# --- programs ---------------------------------------------------------------------------------------------------
def _sums(operator: str) -> bool:
    return operator not in EXACT and not SUMMING.isdisjoint(CATALOGUE[operator].kinds)


def _looks_for_nan(program: Program | None) -> bool:
    return program is not None and any("nan" in node.operator for node in program.nodes)


def _terms(program: Program) -> tuple[float, float]:
    """Number of terms summed one after the other in an output element, and the coarsest unit roundoff."""
    values = specs(program)
    terms, first = 1.0, len(program.inputs)
    for node in program.nodes:
        operator = CATALOGUE[node.operator]
        read = tuple(values[operand] for operand in node.operands)
        outputs = operator.outputs_of(read, node.attributes)
        if _sums(node.operator):
            size = max(1, sum(math.prod(spec.shape) for spec in outputs))
            flops = operator.flops(read, outputs, operator.complete(node.attributes))
            read_size = max((math.prod(spec.shape) for spec in read), default=1)
            terms += max(flops / size, read_size / size)
        first += len(outputs)
    kinds = [np.dtype(spec.dtype) for spec in values]
    roundoff = max((float(np.finfo(each).eps) / 2 for each in kinds if each.kind in "fc"), default=2.0**-53)
    return terms, roundoff
