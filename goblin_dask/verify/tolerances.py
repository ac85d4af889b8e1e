"""Constants of the checks, and the bounds of rounding errors that they rest on.

The figures were found by experiment on honest and dishonest data; `docs/verification.md` says on which.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

WIDTH = 1024
"""Columns of the result that are projected together: one row of a block becomes one number for each projection."""

LONG = 1024
"""Terms of a sum from which projections are first taken in float32, and one rounding of the result counts little."""

CLEAR = 0.5
"""Tolerances up to which a residual that was projected in float32 is taken; larger ones are projected in float64.

The projection's own rounding was at most 0.38 tolerances, for 23 kinds of data and nine orders of summation.
"""

PROJECTIONS = 2
"""Independent random projections of each block."""

ACCEPT = 1.0
"""A residual of at most this many tolerances of float32's summation is accepted without a further look."""

ACCEPT_DOUBLE = 8.0
"""The same in float64: the checker's own rounding, in as many digits, may be biased."""

ROWS = 8
"""Random rows of a chunk that are computed exactly."""

SETTLED_ROWS = 16
"""Suspicious rows that are computed exactly before anything else is decided."""

SPREAD = 8.0
"""An honest row's error is at most this many times the largest error of the deliberate orders of summation."""

REGRESSION_SLOPE = 0.25
"""How near to 1 the slope of the error on a predicted low-precision deviation must be to be recognised as such."""

REGRESSION_R2 = 0.8
"""Share of the error that the predicted deviation must explain to be recognised as low precision."""

SETTLE_ALL = 64.0
"""Above this many tolerances no honest order of summation is known: such rows are never settled by the thousand."""

PROLOGUE = 8.0
"""Weight of the difference between the operands' float32 and float64 evaluations in the tolerance."""

BLAME = 1024.0
"""Where only a guess bounds the error, a result is proven wrong beyond this many times the guess."""

INTEGER_PROJECTIONS = 40
"""Projections modulo a power of two: each misses an error in the highest bit half of the time."""

BLOCK_ELEMENTS = 1 << 17
"""Elements of the blocks that are read at a time, twice as many of float32: 1 MiB, about what a core's cache holds."""

MISS = 0.01
"""Bound of the probability that an error of five times the threshold passes the two projections: 1/(4 t²)."""


def real(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Dtype of a complex dtype's parts; another dtype itself."""
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


def unit_roundoff(dtype: Any) -> float:
    """Largest relative error of rounding to a floating dtype (half of its epsilon)."""
    return float(ml_dtypes.finfo(real(np.dtype(dtype))).eps) / 2


def smallest_normal(dtype: Any) -> float:
    """Smallest positive normal number: below it, machines may flush to zero."""
    return float(ml_dtypes.finfo(np.dtype(dtype)).smallest_normal)


def largest(dtype: Any) -> float:
    """Largest finite number of a floating dtype."""
    return float(ml_dtypes.finfo(np.dtype(dtype)).max)


def gamma(n: int, u: float) -> float:
    """Bound of the relative error of a sum of `n` products in any order: ``n u / (1 - n u)``."""
    return n * u / (1 - n * u) if n * u < 0.5 else float("inf")


def is_floating(dtype: Any) -> bool:
    """Whether a dtype is a real floating one, ml_dtypes' bfloat16 included."""
    dtype = np.dtype(dtype)
    return bool(dtype.kind == "f" or dtype == ml_dtypes.bfloat16)


def accumulator(dtype: Any) -> np.dtype[Any]:
    """Dtype in which a product of this floating dtype is summed: float32 below it, itself otherwise."""
    return np.dtype("f8") if np.dtype(dtype) == np.float64 else np.dtype("f4")
