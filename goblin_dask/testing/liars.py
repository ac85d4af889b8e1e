"""Ways to hand in a wrong result: what lying, broken or hurried volunteers do.

Each is a pure function of a program, its inputs and its right outputs; `corrupt` picks one by name. Tests of policies
and of whole grids use them, and so can users who want to see their own grid refuse a lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from goblin_dask.errors import InputError
from goblin_dask.graphs.execute import execute
from goblin_dask.graphs.program import Program
from goblin_dask.verify.check import thresholds
from goblin_dask.verify.operands import Array
from goblin_dask.verify.rows import bfloat16, tf32

Outputs = list[Array]
Liar = Callable[[Program, Sequence[Array], Outputs, np.random.Generator, Mapping[str, Any]], Outputs]
LIARS: dict[str, Liar] = {}
"""By name."""


def liar(name: str) -> Callable[[Liar], Liar]:
    """Register a way of lying."""

    def register(function: Liar) -> Liar:
        LIARS[name] = function
        return function

    return register


def corrupt(
    name: str,
    program: Program,
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    rng: np.random.Generator,
    **options: Any,
) -> Outputs:
    """Outputs as a liar would hand them in; the given ones are not touched.

    Parameters
    ----------
    name : str
        One of `LIARS`.
    options
        ``times``: size of the error in thresholds of the check (``entry``, ``pair``, ``tile``, ``scaled_rows``,
        ``low_rank``), default 3. ``share``: of rows, columns or depth that are touched (``scaled_rows``, ``panel``).
        ``previous``: outputs of another task (``another_chunk``, ``old_result``).

    Raises
    ------
    InputError
        For a name that nobody registered.
    """
    if name not in LIARS:
        raise InputError(f"no liar is called {name!r}; there are: {', '.join(sorted(LIARS))}")
    copies = [np.array(output) for output in outputs]
    with np.errstate(all="ignore"):
        return LIARS[name](program, inputs, copies, rng, options)


def _victim(outputs: Outputs, rng: np.random.Generator) -> int:
    filled = [n for n, output in enumerate(outputs) if output.size]
    return int(rng.choice(filled)) if filled else 0


def _place(array: Array, rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(int(rng.integers(n)) for n in array.shape)


def _error(
    program: Program, inputs: Sequence[Array], outputs: Outputs, victim: int, options: Mapping[str, Any]
) -> float:
    """Size of a wrong entry; computed from the check's own thresholds."""
    return float(options.get("times", 3.0)) * thresholds(program, inputs, outputs)[victim]


def _shift(array: Array, at: tuple[int, ...], by: float) -> None:
    """Change an entry; one of a dtype without fractions changes by at least one unit."""
    if array.dtype == np.bool_:
        array[at] = ~array[at]
    elif array.dtype.kind in "iu":
        array[at] ^= array.dtype.type(1)
    else:
        before = array[at]
        array[at] = array.dtype.type(before + by)
        if array[at] == before:
            array[at] = np.nextafter(before, array.dtype.type(np.inf)) if array.dtype.kind == "f" else before * 2 + 1


@liar("entry")
def _entry(
    program: Program, inputs: Sequence[Array], outputs: Outputs, rng: np.random.Generator, options: Mapping[str, Any]
) -> Outputs:
    """One wrong entry."""
    victim = _victim(outputs, rng)
    size = _error(program, inputs, outputs, victim, options)
    _shift(outputs[victim], _place(outputs[victim], rng), size * float(rng.choice([-1, 1])))
    return outputs


@liar("pair")
def _pair(
    program: Program, inputs: Sequence[Array], outputs: Outputs, rng: np.random.Generator, options: Mapping[str, Any]
) -> Outputs:
    """Two entries of a row that are wrong by opposite amounts."""
    victim = _victim(outputs, rng)
    size, array = _error(program, inputs, outputs, victim, options), outputs[victim]
    at = _place(array, rng)
    other = (*at[:-1], (at[-1] + 1) % array.shape[-1]) if at else at
    _shift(array, at, size)
    _shift(array, other, -size)
    return outputs


@liar("tile")
def _tile(
    program: Program, inputs: Sequence[Array], outputs: Outputs, rng: np.random.Generator, options: Mapping[str, Any]
) -> Outputs:
    """Noise in a tile of at most 32 × 32."""
    victim = _victim(outputs, rng)
    array = outputs[victim]
    if array.dtype.kind in "biu":
        return _entry(program, inputs, outputs, rng, options)
    size = _error(program, inputs, outputs, victim, options)
    box = tuple(slice(a, a + 32) for a in _place(array, rng))
    array[box] += (size * rng.standard_normal(array[box].shape)).astype(array.dtype)
    return outputs


@liar("zeros")
def _zeros(
    program: Program, inputs: Sequence[Array], outputs: Outputs, rng: np.random.Generator, options: Mapping[str, Any]
) -> Outputs:
    """A tile of zeros: a quarter of each axis."""
    array = outputs[_victim(outputs, rng)]
    array[tuple(slice(0, max(1, n // 4)) for n in array.shape)] = 0
    return outputs


@liar("all_zeros")
def _all_zeros(
    program: Program, inputs: Sequence[Array], outputs: Outputs, rng: np.random.Generator, options: Mapping[str, Any]
) -> Outputs:
    """Nothing but zeros."""
    return [np.zeros_like(output) for output in outputs]


@liar("permuted")
def _permuted(
    program: Program, inputs: Sequence[Array], outputs: Outputs, rng: np.random.Generator, options: Mapping[str, Any]
) -> Outputs:
    """Two rows have changed places."""
    array = outputs[_victim(outputs, rng)]
    if array.ndim and array.shape[0] > 1:
        a, b = rng.choice(array.shape[0], 2, replace=False)
        array[[a, b]] = array[[b, a]]
    return outputs


@liar("sign")
def _sign(
    program: Program, inputs: Sequence[Array], outputs: Outputs, rng: np.random.Generator, options: Mapping[str, Any]
) -> Outputs:
    """The largest entry has the wrong sign."""
    array = outputs[_victim(outputs, rng)]
    if array.dtype.kind == "b":
        np.logical_not(array, out=array)
    elif array.size:
        at = np.unravel_index(int(np.argmax(np.abs(array.astype(np.complex128)))), array.shape)
        array[at] = -array[at]
    return outputs


@liar("old_result")
def _old_result(
    program: Program, inputs: Sequence[Array], outputs: Outputs, rng: np.random.Generator, options: Mapping[str, Any]
) -> Outputs:
    """The right result for inputs that were slightly others: the first differs by a part in a thousand."""
    if "previous" in options:
        return [np.array(output) for output in options["previous"]]
    changed = [np.array(array) for array in inputs]
    for array in changed[:1]:
        array[...] = (array * array.dtype.type(1.001)) if array.dtype.kind in "fc" else array ^ array.dtype.type(1)
    return list(execute(program, changed))


@liar("another_chunk")
def _another_chunk(
    program: Program, inputs: Sequence[Array], outputs: Outputs, rng: np.random.Generator, options: Mapping[str, Any]
) -> Outputs:
    """Another task's result: of inputs whose rows stand elsewhere."""
    if "previous" in options:
        return [np.array(output) for output in options["previous"]]
    moved = [np.roll(array, max(1, array.shape[0] // 2), axis=0) if array.ndim else array + array for array in inputs]
    return list(execute(program, moved))


@liar("panel")
def _panel(
    program: Program, inputs: Sequence[Array], outputs: Outputs, rng: np.random.Generator, options: Mapping[str, Any]
) -> Outputs:
    """A panel of the contraction is left out: part of the last axis of the first input counts as zero."""
    changed = [np.array(array) for array in inputs]
    if changed and changed[0].ndim:
        depth = changed[0].shape[-1]
        width = max(1, int(depth * float(options.get("share", 0.05))))
        start = int(rng.integers(depth - width + 1))
        changed[0][..., start : start + width] = 0
    return list(execute(program, changed))


@liar("low_rank")
def _low_rank(
    program: Program, inputs: Sequence[Array], outputs: Outputs, rng: np.random.Generator, options: Mapping[str, Any]
) -> Outputs:
    """A bias of rank one."""
    victim = _victim(outputs, rng)
    array = outputs[victim]
    if array.dtype.kind in "biu" or array.ndim < 2:
        return _entry(program, inputs, outputs, rng, options)
    size = _error(program, inputs, outputs, victim, options)
    bias = rng.standard_normal((*array.shape[:-1], 1)) * rng.standard_normal(array.shape[-1])
    array += (size * bias).astype(array.dtype)
    return outputs


@liar("scaled_rows")
def _scaled_rows(
    program: Program, inputs: Sequence[Array], outputs: Outputs, rng: np.random.Generator, options: Mapping[str, Any]
) -> Outputs:
    """A share of the rows is one percent too large."""
    array = outputs[_victim(outputs, rng)]
    if array.dtype.kind in "biu" or not array.ndim:
        return _entry(program, inputs, outputs, rng, options)
    rows = rng.choice(array.shape[0], max(1, int(array.shape[0] * float(options.get("share", 0.05)))), replace=False)
    array[rows] *= array.dtype.type(options.get("factor", 1.01))
    return outputs


@liar("nan")
def _nan(
    program: Program, inputs: Sequence[Array], outputs: Outputs, rng: np.random.Generator, options: Mapping[str, Any]
) -> Outputs:
    """One NaN."""
    array = outputs[_victim(outputs, rng)]
    if array.dtype.kind in "biu":
        return _entry(program, inputs, outputs, rng, options)
    array[_place(array, rng)] = np.nan
    return outputs


@liar("dtype")
def _dtype(
    program: Program, inputs: Sequence[Array], outputs: Outputs, rng: np.random.Generator, options: Mapping[str, Any]
) -> Outputs:
    """Another dtype."""
    return [output.astype(np.float64 if output.dtype != np.float64 else np.float32) for output in outputs]


@liar("shape")
def _shape(
    program: Program, inputs: Sequence[Array], outputs: Outputs, rng: np.random.Generator, options: Mapping[str, Any]
) -> Outputs:
    """Another shape with as many elements, and one more axis."""
    return [output[None] for output in outputs]


def _posing(rounded: Callable[[Array], Array]) -> Liar:
    """Compute with rounded operands."""

    def pose(
        program: Program,
        inputs: Sequence[Array],
        outputs: Outputs,
        rng: np.random.Generator,
        options: Mapping[str, Any],
    ) -> Outputs:
        changed = [_round(array, rounded) for array in inputs]
        return [y.astype(x.dtype) for x, y in zip(outputs, execute(program, changed), strict=True)]

    return pose


def _round(array: Array, rounded: Callable[[Array], Array]) -> Array:
    """Round a float32 or float64 array, through float32."""
    if array.dtype not in (np.float32, np.float64):
        return array
    return rounded(np.ascontiguousarray(array, np.float32)).astype(array.dtype)


LIARS["float32"] = _posing(lambda array: array)
LIARS["tf32"] = _posing(tf32)
LIARS["bfloat16"] = _posing(bfloat16)
LIARS["float16"] = _posing(lambda array: array.astype(np.float16).astype(np.float32))
LIARS["float8"] = _posing(lambda array: array.astype(ml_dtypes.float8_e5m2).astype(np.float32))
