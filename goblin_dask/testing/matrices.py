"""Honest matrices of many kinds, and honest orders of summation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from goblin_dask.verify.operands import Array

Shape = tuple[int, int]
Kind = Callable[[np.random.Generator, Shape], Array]
Order = Callable[[Array, Array], Array]


def _normal(rng: np.random.Generator, shape: Shape) -> Array:
    return rng.standard_normal(shape, np.float32)


def _uniform(rng: np.random.Generator, shape: Shape) -> Array:
    return rng.random(shape, np.float32)


def _hilbert(rng: np.random.Generator, shape: Shape) -> Array:
    i, j = np.ogrid[: shape[0], : shape[1]]
    return (1 / (i + j + 1)).astype(np.float32)


def _alternating(rng: np.random.Generator, shape: Shape) -> Array:
    return (_uniform(rng, shape) + 1) * np.where(np.add.outer(*map(np.arange, shape)) % 2, 1, -1).astype(np.float32)


def _scaled(axis: int, low: float, high: float) -> Kind:
    def make(rng: np.random.Generator, shape: Shape) -> Array:
        size = shape[0] if axis == 0 else shape[1]
        scale = 10.0 ** rng.uniform(low, high, size)
        return (_normal(rng, shape) * (scale[:, None] if axis == 0 else scale)).astype(np.float32)

    return make


def _huge_row(rng: np.random.Generator, shape: Shape) -> Array:
    values = _normal(rng, shape)
    values[rng.integers(shape[0])] *= np.float32(1e8)
    return values


def _huge_entry(rng: np.random.Generator, shape: Shape) -> Array:
    values = _normal(rng, shape)
    values[rng.integers(shape[0]), rng.integers(shape[1])] = 1e10
    return values


def _sparse(rng: np.random.Generator, shape: Shape) -> Array:
    return np.where(rng.random(shape) < 0.01, _normal(rng, shape), 0).astype(np.float32)


def _low_rank(rng: np.random.Generator, shape: Shape) -> Array:
    return (_normal(rng, (shape[0], 2)) @ _normal(rng, (2, shape[1]))).astype(np.float32)


def _zero_columns(rng: np.random.Generator, shape: Shape) -> Array:
    values = _normal(rng, shape)
    values[:, ::3] = 0
    return values


KINDS: Mapping[str, Kind] = {
    "normal": _normal,
    "uniform": _uniform,
    "constant": lambda rng, shape: np.full(shape, 0.1, np.float32),
    "constant rows": lambda rng, shape: np.broadcast_to(_uniform(rng, (shape[0], 1)), shape).copy(),
    "constant columns": lambda rng, shape: np.broadcast_to(_uniform(rng, (1, shape[1])), shape).copy(),
    "Hilbert": _hilbert,
    "alternating signs": _alternating,
    "scaled rows": _scaled(0, -12, 12),
    "scaled columns": _scaled(1, -12, 12),
    "denormals": lambda rng, shape: (_normal(rng, shape) * np.float32(1e-20)).astype(np.float32),
    "tiny": lambda rng, shape: (_normal(rng, shape) * 1e-38).astype(np.float32),
    "large": lambda rng, shape: (_normal(rng, shape) * 1e15).astype(np.float32),
    "huge row": _huge_row,
    "huge entry": _huge_entry,
    "sparse": _sparse,
    "integers": lambda rng, shape: rng.integers(-9, 9, shape).astype(np.float32),
    "counts": lambda rng, shape: rng.poisson(3.0, shape).astype(np.float32),
    "offset": lambda rng, shape: (_normal(rng, shape) + 100).astype(np.float32),
    "low rank": _low_rank,
    "zero columns": _zero_columns,
    "zeros": lambda rng, shape: np.zeros(shape, np.float32),
    "lognormal": lambda rng, shape: np.exp(3 * rng.standard_normal(shape)).astype(np.float32),
    "ramp": lambda rng, shape: np.linspace(0, 1, shape[0] * shape[1], dtype=np.float32).reshape(shape),
}


def sequential(a: Array, b: Array, order: Iterable[int] | None = None) -> Array:
    """One product after the other, as plain loops sum."""
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
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
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for start in range(0, a.shape[1], width):
        total += a[:, start : start + width] @ b[start : start + width]
    return total


def flushed(a: Array, b: Array) -> Array:
    """BLAS on a machine that flushes denormal numbers to zero."""
    tiny = np.float32(2.0**-126)
    a, b = (np.where(np.abs(x) < tiny, np.float32(0), x) for x in (a, b))
    c = a @ b
    return np.where(np.abs(c) < tiny, np.float32(0), c)


ORDERS: Mapping[str, Order] = {
    "BLAS": lambda a, b: a @ b,
    "sequential": sequential,
    "reversed": lambda a, b: sequential(a, b, range(a.shape[1] - 1, -1, -1)),
    "pairwise": pairwise,
    "blocked": blocked,
    "transposed": lambda a, b: np.ascontiguousarray((b.T @ a.T).T),
    "flushed": flushed,
}
