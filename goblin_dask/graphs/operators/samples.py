"""Arrays for the operators' examples: every dtype, and the awkward shapes, layouts and values of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from goblin_dask.graphs.operators.dtypes import DTYPES

SHAPES = ((), (1,), (0,), (5,), (3, 4), (2, 0, 3), (2, 3, 4))
FLOATS = ("float16", "bfloat16", "float32", "float64")
INEXACT = (*FLOATS, "complex64", "complex128")
BLAS = ("float32", "float64", "complex64", "complex128")
INTEGERS = tuple(name for name in DTYPES if "int" in name)
ALL = tuple(DTYPES)
ORDERED = tuple(dtype for dtype in ALL if dtype != "bfloat16")
"""Those that NumPy sorts."""


def sample(shape: tuple[int, ...], dtype: str, seed: int = 0, special: bool = True) -> Any:
    """Small numbers of both signs, with NaN, infinities, zeros of both signs or extreme integers when `special`."""
    rng = np.random.default_rng((seed, *shape, len(dtype)))
    kind = DTYPES[dtype].kind if dtype != "bfloat16" else "f"
    if kind == "b":
        return np.asarray(rng.random(shape) > 0.5)
    if kind in "ui":
        info = np.iinfo(dtype)
        values = rng.integers(0 if kind == "u" else -9, 10, shape).astype(dtype)
        awkward: list[Any] = [info.max, info.min, 0]
    else:
        values = rng.normal(size=shape) * 2
        if kind == "c":
            values = values + 1j * rng.normal(size=shape)
        with np.errstate(all="ignore"):
            values = np.asarray(values).astype(DTYPES[dtype])
        awkward = [np.nan, np.inf, -np.inf, -0.0, 0.0]
    values = np.asarray(values)
    if special and values.size:
        flat = values.reshape(-1)
        for value in awkward[: max(1, values.size // 3)]:
            flat[rng.integers(values.size)] = value
    return values


def strided(array: Any) -> Any:
    """The same elements in an array that is not C-contiguous, where it has two elements in some axis."""
    if not array.ndim:
        return array
    padded = np.zeros(tuple(2 * size for size in array.shape), array.dtype)
    view = padded[tuple(slice(None, None, 2) for _ in array.shape)]
    view[...] = array
    return view


def arrays(
    dtypes: tuple[str, ...] = ALL, shapes: tuple[tuple[int, ...], ...] = SHAPES, special: bool = True
) -> Iterator[Any]:
    """Each dtype with each shape, contiguous, and some not."""
    for seed, dtype in enumerate(dtypes):
        for shape in shapes:
            array = sample(shape, dtype, seed, special)
            yield array
            if len(shape) > 1:
                yield strided(array)
                yield sample(shape[::-1], dtype, seed + 100, special).T


def unary(dtypes: tuple[str, ...] = ALL, special: bool = True, **attributes: Any) -> Any:
    """Examples of an operator of one operand of any shape."""

    def examples() -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        for array in arrays(dtypes, special=special):
            yield (array,), dict(attributes)

    return examples


PAIRS = (((), ()), ((3,), ()), ((4,), (3, 4)), ((3, 1), (1, 4)), ((0,), (1,)), ((1,), (1,)), ((2, 3), (2, 3)))


def binary(dtypes: tuple[str, ...] = ALL) -> Any:
    """Examples of an operator of two operands that broadcast: equal dtypes, and each with its neighbour."""

    def examples() -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        for i, dtype in enumerate(dtypes):
            for other in {dtype, dtypes[(i + 1) % len(dtypes)], dtypes[(i + 5) % len(dtypes)]}:
                for j, (a, b) in enumerate(PAIRS):
                    first, second = sample(a, dtype, j), sample(b, other, j + 50)
                    yield (first, strided(second)), {}

    return examples
