"""How wrong a result is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from goblin_dask.verify.operands import Array

BEYOND = 1e300
"""Larger than any threshold, and still a number in JSON."""


def distance(answer: Sequence[Array], right: Sequence[Array], limits: Sequence[float]) -> tuple[float, float]:
    """Largest wrong entry over the threshold of its output, and largest wrong entry.

    Both are `BEYOND` where they are no number, or where shape or dtype are others.

    Parameters
    ----------
    limits : sequence of float
        As from `goblin_dask.verify.check.thresholds`.
    """
    measured = [_distance(a, b, limit) for a, b, limit in zip(answer, right, limits, strict=True)]
    size, error = (max(column) for column in zip(*measured, strict=True))
    return size, error


def _distance(lie: Array, truth: Array, threshold: float) -> tuple[float, float]:
    """Largest wrong entry of an output over its threshold, and itself."""
    if lie.shape != truth.shape or lie.dtype != truth.dtype:
        return BEYOND, BEYOND
    wide = np.complex128 if truth.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        difference = np.abs(lie.astype(wide) - truth.astype(wide))
    difference[(lie == truth) | (np.isnan(lie) & np.isnan(truth))] = 0
    if np.isnan(difference).any():
        return BEYOND, BEYOND
    error = min(float(difference.max(initial=0.0)), BEYOND)
    if not threshold:
        return (BEYOND if error else 0.0), error
    return min(error / threshold, BEYOND), error
