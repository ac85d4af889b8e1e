"""Fourier transforms of many vectors: one transform of a random combination of them.

A transform T is linear, so ``T(sum x_b a_b) = sum x_b T(a_b)`` for random real x, whatever its normalization, padding
and symmetry. Errors are of the size of ``u log2(n)`` times a vector's norm (Higham, chapter 24); vectors are scaled
alike by exact powers of two, and taken in blocks, so that none hides behind others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from goblin_dask.graphs.operators import CATALOGUE
from goblin_dask.graphs.operators.base import Attributes
from goblin_dask.graphs.operators.reductions import axes_of
from goblin_dask.graphs.schedule import Step
from goblin_dask.messages import ArraySpec
from goblin_dask.verify.bounds import Bounded
from goblin_dask.verify.operands import Array
from goblin_dask.verify.product import Finding
from goblin_dask.verify.relations.base import (
    Relation,
    Residuals,
    finite,
    flushed,
    norm,
    powers_of_two,
    roundoff,
    vectors,
    wide,
)
from goblin_dask.verify.tolerances import WIDTH

LEAST = 16
"""Vectors below which computing the transforms is as cheap."""
HONEST = 8.0
"""Times ``u (4 + log2 n)``: what an honest element errs by, relative to the root mean square of its transform."""


def _axes(attributes: Attributes, ndim: int) -> tuple[int, ...]:
    if "axis" in attributes:
        axis: Any = attributes["axis"]
        return (axis % ndim,)
    return tuple(axes_of(attributes, ndim))


def _batch(step: Step, specs: Sequence[ArraySpec]) -> int:
    shape = specs[0].shape
    axes = _axes(step.attributes, len(shape))
    return math.prod(size for axis, size in enumerate(shape) if axis not in axes)


def _transform(name: str) -> Any:
    kernel = CATALOGUE[name].kernel

    def check(
        attributes: Attributes, operands: Sequence[Bounded], outputs: Sequence[Array], rng: np.random.Generator
    ) -> Finding | None:
        (operand,), (given,) = operands, outputs
        if not operand.fine.size or not finite(operand.fine, operand.errors()[0], *outputs):
            return None
        residuals, u = Residuals(), roundoff(given)
        ndim = given.ndim
        axes = _axes(attributes, ndim)
        front = tuple(range(len(axes)))  # transformed axes last, all others become the first
        a = np.moveaxis(operand.fine, axes, tuple(i - len(axes) for i in front))
        y = np.moveaxis(given, axes, tuple(i - len(axes) for i in front))
        error = np.moveaxis(np.asarray(operand.errors()[0]), axes, tuple(i - len(axes) for i in front))
        inner, outer = a.shape[ndim - len(axes) :], y.shape[ndim - len(axes) :]
        a, y, error = a.reshape(-1, math.prod(inner)), y.reshape(-1, math.prod(outer)), error.reshape(len(y), -1)
        moved = {**attributes, **({"axis": 1} if "axis" in attributes else {"axes": tuple(i + 1 for i in front)})}
        points = max(a.shape[1], y.shape[1])
        relative = HONEST * u * (4 + math.log2(points))
        for start in range(0, len(a), WIDTH):
            block = slice(start, start + WIDTH)
            part, result = wide(a[block]), wide(y[block])
            sizes = np.maximum(norm(result) / math.sqrt(y.shape[1]), _gain(kernel, moved, inner) * norm(part))
            x = vectors(rng, len(part)) / powers_of_two(sizes)
            combined = (x.T @ part).reshape(-1, *inner)
            expected = kernel(np, (combined,), moved)[0].reshape(len(combined), -1)
            tight = relative * math.sqrt(len(part)) + len(part) * flushed(given) * np.abs(x).max()
            if not operand.exact:  # |T| of anything is at most its sum, times the normalization
                tight = (
                    tight + (np.abs(x.T) @ error[block]).sum(axis=1, keepdims=True) * _gain(kernel, moved, inner) * 2
                )
            residuals.add("a random combination", np.abs(x.T @ result - expected), np.asarray(tight))
        return residuals.finding

    return check


def _gain(kernel: Any, attributes: Attributes, inner: tuple[int, ...]) -> float:
    """Root mean square of the transform of a vector of norm 1: that of a unit impulse."""
    impulse = np.zeros((1, *inner))
    impulse[(0,) * impulse.ndim] = 1.0
    return float(np.sqrt(np.mean(np.square(np.abs(kernel(np, (impulse,), attributes)[0])))))


TRANSFORMS: dict[str, Relation] = {
    name: Relation(
        "combination", _transform(name), passes=6.0, applies=lambda step, specs: _batch(step, specs) >= LEAST
    )
    for name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft", "fftn", "ifftn", "rfftn", "irfftn")
}
