"""Results that were right, and then damaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from goblin_dask.graphs.execute import execute
from goblin_dask.graphs.program import Program
from goblin_dask.testing.liars.registry import Outputs, error_size, liar, place, shift, victim_of
from goblin_dask.verify.operands import Array


@liar("entry")
def _entry(
    program: Program, inputs: Sequence[Array], outputs: Outputs, rng: np.random.Generator, options: Mapping[str, Any]
) -> Outputs:
    """One wrong entry."""
    victim = victim_of(outputs, rng)
    size = error_size(program, inputs, outputs, victim, options)
    shift(outputs[victim], place(outputs[victim], rng), size * float(rng.choice([-1, 1])))
    return outputs


@liar("pair")
def _pair(
    program: Program, inputs: Sequence[Array], outputs: Outputs, rng: np.random.Generator, options: Mapping[str, Any]
) -> Outputs:
    """Two entries of a row that are wrong by opposite amounts."""
    victim = victim_of(outputs, rng)
    size, array = error_size(program, inputs, outputs, victim, options), outputs[victim]
    at = place(array, rng)
    other = (*at[:-1], (at[-1] + 1) % array.shape[-1]) if at else at
    shift(array, at, size)
    shift(array, other, -size)
    return outputs


@liar("tile")
def _tile(
    program: Program, inputs: Sequence[Array], outputs: Outputs, rng: np.random.Generator, options: Mapping[str, Any]
) -> Outputs:
    """Noise in a tile of at most 32 × 32."""
    victim = victim_of(outputs, rng)
    array = outputs[victim]
    if array.dtype.kind in "biu":
        return _entry(program, inputs, outputs, rng, options)
    size = error_size(program, inputs, outputs, victim, options)
    box = tuple(slice(a, a + 32) for a in place(array, rng))
    array[box] += (size * rng.standard_normal(array[box].shape)).astype(array.dtype)
    return outputs


@liar("zeros")
def _zeros(
    program: Program, inputs: Sequence[Array], outputs: Outputs, rng: np.random.Generator, options: Mapping[str, Any]
) -> Outputs:
    """A tile of zeros: a quarter of each axis."""
    array = outputs[victim_of(outputs, rng)]
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
    array = outputs[victim_of(outputs, rng)]
    if array.ndim and array.shape[0] > 1:
        a, b = rng.choice(array.shape[0], 2, replace=False)
        array[[a, b]] = array[[b, a]]
    return outputs


@liar("sign")
def _sign(
    program: Program, inputs: Sequence[Array], outputs: Outputs, rng: np.random.Generator, options: Mapping[str, Any]
) -> Outputs:
    """The largest entry has the wrong sign."""
    array = outputs[victim_of(outputs, rng)]
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
    victim = victim_of(outputs, rng)
    array = outputs[victim]
    if array.dtype.kind in "biu" or array.ndim < 2:
        return _entry(program, inputs, outputs, rng, options)
    size = error_size(program, inputs, outputs, victim, options)
    bias = rng.standard_normal((*array.shape[:-1], 1)) * rng.standard_normal(array.shape[-1])
    array += (size * bias).astype(array.dtype)
    return outputs


@liar("scaled_rows")
def _scaled_rows(
    program: Program, inputs: Sequence[Array], outputs: Outputs, rng: np.random.Generator, options: Mapping[str, Any]
) -> Outputs:
    """A share of the rows is one percent too large."""
    array = outputs[victim_of(outputs, rng)]
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
    array = outputs[victim_of(outputs, rng)]
    if array.dtype.kind in "biu":
        return _entry(program, inputs, outputs, rng, options)
    array[place(array, rng)] = np.nan
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


@liar("bias")
def _bias(
    program: Program, inputs: Sequence[Array], outputs: Outputs, rng: np.random.Generator, options: Mapping[str, Any]
) -> Outputs:
    """All rows are moved by the same vector, as somebody would who wants the average elsewhere."""
    victim = victim_of(outputs, rng)
    array = outputs[victim]
    if array.dtype.kind in "biu" or not array.ndim:
        return _entry(program, inputs, outputs, rng, options)
    size = error_size(program, inputs, outputs, victim, options)
    array += (size * rng.standard_normal(array.shape[-1])).astype(array.dtype)
    return outputs


@liar("margin")
def _margin(
    program: Program, inputs: Sequence[Array], outputs: Outputs, rng: np.random.Generator, options: Mapping[str, Any]
) -> Outputs:
    """Every entry is off by the same multiple of the threshold, up or down."""
    victim = victim_of(outputs, rng)
    array = outputs[victim]
    if array.dtype.kind in "biu":
        return _entry(program, inputs, outputs, rng, options)
    size = error_size(program, inputs, outputs, victim, options)
    array += (size * rng.choice([-1.0, 1.0], array.shape)).astype(array.dtype)
    return outputs


@liar("blown_up")
def _blown_up(
    program: Program, inputs: Sequence[Array], outputs: Outputs, rng: np.random.Generator, options: Mapping[str, Any]
) -> Outputs:
    """A thousand times too large: one such gradient moves a whole model."""
    array = outputs[victim_of(outputs, rng)]
    if array.dtype.kind in "biu":
        return _entry(program, inputs, outputs, rng, options)
    array *= array.dtype.type(options.get("factor", 1000.0))
    return outputs
