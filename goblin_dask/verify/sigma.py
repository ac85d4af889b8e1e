"""The rule for two honest runs of one program: how far rounding alone carries them apart.

A run in the program's own precision and one in float64 give the scale, for each output: relative tolerances cannot
(a true gradient of zero has a relative error of 4e9).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from goblin_dask.verify.operands import Array
from goblin_dask.verify.tolerances import unit_roundoff

RMS = 16.0
"""Two honest runs differ by at most this many sigma, as root mean square."""

LARGEST = 128.0
"""Two honest runs differ by at most this many sigma in any element."""

DOUBLE = 2.0**-29
"""What the sigma of a float32 run is multiplied with, for a program in float64."""


def rms(values: Array) -> float:
    """Root mean square, without overflow; 0 for no elements."""
    size = np.abs(np.asarray(values, np.complex128 if values.dtype.kind == "c" else np.float64))
    top = float(size.max(initial=0.0))
    if not top or not np.isfinite(top):
        return top
    return top * float(np.sqrt(np.mean(np.square(size / top))))


def sigma(coarse: Array, fine: Array, dtype: np.dtype[np.generic], floor: float = 0.0) -> float:
    """Scale of rounding errors of one output.

    Parameters
    ----------
    coarse : array
        The output of a run in float32.
    fine : array
        The same of a run in float64.
    dtype : numpy.dtype
        Of the output as it is declared: that of a float64 program gets the scale of float64.
    floor : float
        Scale at least.
    """
    finite = np.isfinite(coarse) & np.isfinite(fine)
    spread = rms(np.where(finite, coarse, 0) - np.where(finite, fine, 0))
    if unit_roundoff(dtype) <= 2.0**-53:
        spread *= DOUBLE
    return max(spread, unit_roundoff(dtype) * rms(np.where(finite, fine, 0)) / 2, floor)


@dataclass(frozen=True)
class Distance:
    """How far two results are apart."""

    ratio: float
    """Over what is accepted; NaN when they are not comparable."""
    largest: float
    """Largest difference of an element, in sigma."""


def distance(a: Array, b: Array, scale: float) -> Distance:
    """Compare two outputs by the rule; NaN and infinities must stand in the same places."""
    a, b = (np.asarray(x, np.complex128 if x.dtype.kind == "c" else np.float64) for x in (a, b))
    with np.errstate(invalid="ignore", over="ignore"):
        special = ~(np.isfinite(a) & np.isfinite(b))
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        if not np.all(same[special]):
            return Distance(float("nan"), float("inf"))
        difference = np.where(special, 0, a) - np.where(special, 0, b)
    mean, top = rms(difference), float(np.abs(difference).max(initial=0.0))
    if not top:
        return Distance(0.0, 0.0)
    if not scale:
        return Distance(float("inf"), float("inf"))
    return Distance(max(mean / (RMS * scale), top / (LARGEST * scale)), top / scale)
