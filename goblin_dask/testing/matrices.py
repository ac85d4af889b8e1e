"""Honest matrices of many kinds, and honest orders of summation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from goblin_dask.verify.operands import Array
from goblin_dask.verify.tolerances import is_floating

Shape = tuple[int, int]
Kind = Callable[[np.random.Generator, Shape, Any], Array]
"""Of generator, shape and dtype, float32 or float64."""
Order = Callable[[Array, Array], Array]


def _normal(rng: np.random.Generator, shape: Shape, dtype: Any) -> Array:
    return rng.standard_normal(shape, dtype)


def _uniform(rng: np.random.Generator, shape: Shape, dtype: Any) -> Array:
    return rng.random(shape, dtype)


def _hilbert(rng: np.random.Generator, shape: Shape, dtype: Any) -> Array:
    i, j = np.ogrid[: shape[0], : shape[1]]
    return (1 / (i + j + 1)).astype(dtype)


def _alternating(rng: np.random.Generator, shape: Shape, dtype: Any) -> Array:
    signs = np.where(np.add.outer(*map(np.arange, shape)) % 2, 1, -1)
    return ((_uniform(rng, shape, dtype) + 1) * signs).astype(dtype)


def _scaled(axis: int, low: float, high: float) -> Kind:
    def make(rng: np.random.Generator, shape: Shape, dtype: Any) -> Array:
        scale = 10.0 ** rng.uniform(low, high, shape[axis])
        return (_normal(rng, shape, dtype) * (scale[:, None] if axis == 0 else scale)).astype(dtype)

    return make


def _sized(single: float, double: float) -> Kind:
    """Normal numbers of some magnitude, near one of the ends of each dtype's range."""

    def make(rng: np.random.Generator, shape: Shape, dtype: Any) -> Array:
        return (_normal(rng, shape, dtype) * (double if np.dtype(dtype) == np.float64 else single)).astype(dtype)

    return make


def _huge_row(rng: np.random.Generator, shape: Shape, dtype: Any) -> Array:
    values = _normal(rng, shape, dtype)
    values[rng.integers(shape[0])] *= values.dtype.type(1e8)
    return values


def _huge_entry(rng: np.random.Generator, shape: Shape, dtype: Any) -> Array:
    values = _normal(rng, shape, dtype)
    values[rng.integers(shape[0]), rng.integers(shape[1])] = 1e10
    return values


def _sparse(rng: np.random.Generator, shape: Shape, dtype: Any) -> Array:
    return np.where(rng.random(shape) < 0.01, _normal(rng, shape, dtype), 0).astype(dtype)


def _low_rank(rng: np.random.Generator, shape: Shape, dtype: Any) -> Array:
    return _normal(rng, (shape[0], 2), dtype) @ _normal(rng, (2, shape[1]), dtype)


def _zero_columns(rng: np.random.Generator, shape: Shape, dtype: Any) -> Array:
    values = _normal(rng, shape, dtype)
    values[:, ::3] = 0
    return values


KINDS: Mapping[str, Kind] = {
    "normal": _normal,
    "uniform": _uniform,
    "constant": lambda rng, shape, dtype: np.full(shape, 0.1, dtype),
    "constant rows": lambda rng, shape, dtype: np.broadcast_to(_uniform(rng, (shape[0], 1), dtype), shape).copy(),
    "constant columns": lambda rng, shape, dtype: np.broadcast_to(_uniform(rng, (1, shape[1]), dtype), shape).copy(),
    "Hilbert": _hilbert,
    "alternating signs": _alternating,
    "scaled rows": _scaled(0, -12, 12),
    "scaled columns": _scaled(1, -12, 12),
    "denormals": _sized(1e-20, 1e-155),
    "tiny": _sized(1e-38, 1e-308),
    "large": _sized(1e15, 1e150),
    "huge row": _huge_row,
    "huge entry": _huge_entry,
    "sparse": _sparse,
    "integers": lambda rng, shape, dtype: rng.integers(-9, 9, shape).astype(dtype),
    "counts": lambda rng, shape, dtype: rng.poisson(3.0, shape).astype(dtype),
    "offset": lambda rng, shape, dtype: _normal(rng, shape, dtype) + np.dtype(dtype).type(100),
    "low rank": _low_rank,
    "zero columns": _zero_columns,
    "zeros": lambda rng, shape, dtype: np.zeros(shape, dtype),
    "lognormal": lambda rng, shape, dtype: np.exp(3 * rng.standard_normal(shape)).astype(dtype),
    "ramp": lambda rng, shape, dtype: np.linspace(0, 1, shape[0] * shape[1], dtype=dtype).reshape(shape),
}


def matrix(kind: str, rng: np.random.Generator, shape: Shape, dtype: Any = np.float32) -> Array:
    """A matrix of a kind in any dtype: a complex one is made of two, others are cut to their dtype's finite range."""
    dtype = np.dtype(dtype)
    if dtype.kind == "c":
        real = np.dtype(f"f{dtype.itemsize // 2}")
        return (KINDS[kind](rng, shape, real) + 1j * KINDS[kind](rng, shape, real)).astype(dtype)
    if dtype in (np.float32, np.float64):
        return KINDS[kind](rng, shape, dtype)
    if is_floating(dtype):
        top = float(ml_dtypes.finfo(dtype).max)
        return np.clip(KINDS[kind](rng, shape, np.float32), -top, top).astype(dtype)
    if dtype == np.bool_:
        return KINDS[kind](rng, shape, np.float32) > 0.5
    info = np.iinfo(dtype)
    # of 64 bits the largest float64 below
    return np.clip(KINDS[kind](rng, shape, np.float64), info.min, np.nextafter(float(info.max), 0)).astype(dtype)


def operands(
    kind: str, partner: str, shape: tuple[int, int, int], rng: np.random.Generator, dtype: Any = np.float32
) -> tuple[Array, Array]:
    """Two factors, m × k and k × n, each of a kind; where columns of the left are scaled, every term counts."""
    m, k, n = shape
    a, b = matrix(kind, rng, (m, k), dtype), matrix(partner, rng, (k, n), dtype)
    if kind == "scaled columns" and b.dtype.kind in "fc":
        b = (b / np.abs(a).max(axis=0).clip(1e-30)[:, None]).astype(b.dtype)
    return a, b


def sequential(a: Array, b: Array, order: Iterable[int] | None = None) -> Array:
    """One product after the other, as plain loops sum."""
    total = np.zeros((a.shape[0], b.shape[1]), a.dtype)
    for l in range(a.shape[1]) if order is None else order:
        total += a[:, l, None] * b[l]
    return total


def pairwise(a: Array, b: Array) -> Array:
    """Halves of the sum apart, as recursive sums do."""
    if a.shape[1] <= 8:
        return sequential(a, b)
    half = a.shape[1] // 2
    return pairwise(a[:, :half], b[:half]) + pairwise(a[:, half:], b[half:])


def blocked(a: Array, b: Array, width: int = 37) -> Array:
    """Panels by BLAS, then one after the other."""
    total = np.zeros((a.shape[0], b.shape[1]), a.dtype)
    for start in range(0, a.shape[1], width):
        total += a[:, start : start + width] @ b[start : start + width]
    return total


def flushed(a: Array, b: Array) -> Array:
    """BLAS on a machine that flushes denormal numbers to zero."""
    tiny = np.finfo(a.dtype).smallest_normal
    a, b = (np.where(np.abs(x) < tiny, x.dtype.type(0), x) for x in (a, b))
    c = a @ b
    return np.where(np.abs(c) < tiny, c.dtype.type(0), c)


def wide(a: Array, b: Array) -> Array:
    """Summed in a wider dtype and rounded once, as no machine does better."""
    wider = np.float64 if a.dtype == np.float32 else np.longdouble
    total: Array = a.astype(wider) @ b.astype(wider)
    return total.astype(a.dtype)


ORDERS: Mapping[str, Order] = {
    "BLAS": lambda a, b: a @ b,
    "sequential": sequential,
    "reversed": lambda a, b: sequential(a, b, range(a.shape[1] - 1, -1, -1)),
    "pairwise": pairwise,
    "blocked": blocked,
    "transposed": lambda a, b: np.ascontiguousarray((b.T @ a.T).T),
    "flushed": flushed,
    "einsum": lambda a, b: np.einsum("ij,jk->ik", a, b),
    "wide": wide,
}
"""Of the sum over the inner axis, in the operands' own dtype (real and floating; most for any other)."""
