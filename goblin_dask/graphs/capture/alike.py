"""Results that rounding explains, and data like the example's: with which a captured program is compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

ALIKE = {"float16": 3e-2, "bfloat16": 1e-1, "float32": 1e-3, "complex64": 1e-3}
"""Relative distance, as root mean square, of results that are alike; 1e-9 in double precision."""

Array = np.ndarray[Any, Any]


def alike(a: Array, b: Array, closeness: float = 1.0) -> bool:
    """Whether rounding may explain how two arrays of one shape and dtype differ.

    Parameters
    ----------
    a, b : numpy.ndarray
        `b` being the one that is right.
    closeness : float
        Factor on `ALIKE`.
    """
    if a.dtype.kind in "biu":
        return bool(np.mean(a != b) <= 0.01) if a.size else True  # positions of equal maxima, rounded numbers
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    a, b, tolerance = a.astype(wide), b.astype(wide), closeness * ALIKE.get(a.dtype.name, 1e-9)
    with np.errstate(all="ignore"):
        finite = np.isfinite(b)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        difference, size = np.where(finite, np.abs(a - b), 0), np.where(finite, np.abs(b), 0)
    apart = float(np.sqrt(np.mean(np.square(difference)))) if a.size else 0.0
    scale = float(np.sqrt(np.mean(np.square(size)))) if a.size else 0.0
    return bool(np.mean(same | finite) >= 0.99 if a.size else True) and apart <= tolerance * max(scale, 1e-30)


def difference(found: Sequence[Any], wanted: Sequence[Any], *, values: bool = True, places: bool = True) -> str:
    """Which result is not alike, and how; nothing where all are.

    Parameters
    ----------
    found, wanted : sequence
        Leaves of a captured program's result, which its new state may follow, and of the program's itself.
    values : bool
        Whether values are compared, or shapes and dtypes alone.
    places : bool
        Whether integers are.
    """
    for number, (a, b) in enumerate(zip(found, wanted, strict=False)):
        if not isinstance(b, np.ndarray):
            continue
        if not isinstance(a, np.ndarray) or (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"the captured program's result {number} is not of the module's shape and dtype"
        if values and (places or b.dtype.kind not in "iu") and not alike(a, b):
            return (
                f"the captured program's result {number} is not what the module gives on the example: it does "
                "something that cannot be recorded, such as to depend on numbers outside of its arguments"
            )
    return ""


def drawn(example: Array, axis: int | None, size: int, random: np.random.Generator) -> Array:
    """Data like an example's, so that a program that takes the one takes the other.

    Fractions are the example's, each up to a tenth nearer to zero, integers and booleans the example's in any order. An
    example whose elements are all the same says little: then fractions lie between 0 and 1, integers are that one and
    one beside it, and booleans are any.

    Parameters
    ----------
    example : numpy.ndarray
    axis, size
        Length along an axis, the batch; of the example's own shape where there is none.
    """
    shape = tuple(size if place == axis else length for place, length in enumerate(example.shape))
    pool, kind = example.reshape(-1), example.dtype.kind
    varied = bool(pool.size) and bool((pool != pool[0]).any())
    if kind in "iu" and pool.size and not varied:
        pool = np.array([pool[0], pool[0] - 1 if pool[0] > 0 else pool[0] + 1], example.dtype)  # both may be indices
    if kind in "iu" or (kind == "b" and varied):
        return np.asarray(random.choice(pool, shape) if pool.size else np.zeros(shape, example.dtype))
    if kind == "b":
        return random.integers(0, 2, shape).astype(bool)
    if not varied:
        return random.uniform(0.05, 0.95, shape).astype(example.dtype)
    rows = example if axis is None else np.take(example, np.arange(size) % example.shape[axis], axis)
    wide = np.complex128 if kind == "c" else np.float64
    return (rows.astype(wide) * random.uniform(0.9, 1.0, shape)).astype(example.dtype)
