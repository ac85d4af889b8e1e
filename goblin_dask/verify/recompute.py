"""Recomputation: the checker runs the program itself, and asks whether rounding explains the difference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from goblin_dask.graphs.execute import execute
from goblin_dask.graphs.program import Program
from goblin_dask.verify.bounds import Bounded, carry
from goblin_dask.verify.evaluate import Source
from goblin_dask.verify.operands import Array
from goblin_dask.verify.product import Finding
from goblin_dask.verify.scales import Scales
from goblin_dask.verify.sigma import LARGEST, sigma
from goblin_dask.verify.tolerances import BLAME, largest

SPREAD = 16.0
"""An honest element's error is at most this many times that of the checker's own run, where that is larger than the
tight bound: biased sums."""


def equal(a: Array, b: Array) -> Array:
    """Elementwise: the same number, or both NaN."""
    same = a == b
    if a.dtype.kind not in "biu":
        same |= np.isnan(a) & np.isnan(b)
    return np.asarray(same)


def check_by_recomputation(
    program: Program, inputs: Sequence[Source], outputs: Sequence[Array], scales: Scales | None = None
) -> Finding:
    """Compare outputs with the checker's own; bit for bit, else within what rounding explains.

    Parameters
    ----------
    scales : Scales, optional
        For programs with several heavy operators: what agrees with the checker's own run by the sigma rule, as another
        owner's replica would have to, is accepted without bounds, which take twenty times as long as the program.
    """
    own = execute(program, inputs)
    different = [n for n, (a, b) in enumerate(zip(outputs, own, strict=True)) if not equal(a, b).all()]
    if not different:
        return Finding("accepted", 0.0, miss=0.0)
    if scales is not None:
        ratio, _ = scales.compare(program, inputs, program.outputs, outputs, own)
        if ratio <= 1:
            return Finding("accepted", ratio, miss=0.0)
    worst = Finding("accepted", 0.0, miss=0.0)
    bounds = carry(program, inputs, [program.outputs[n] for n in different])
    for n, bounded in zip(different, bounds, strict=True):
        found = judge(outputs[n], own[n], bounded, n)
        rank = ("accepted", "unproven", "wrong")
        found.ratio = max(found.ratio, worst.ratio)
        worst = found if rank.index(found.verdict) >= rank.index(worst.verdict) else worst
    return worst


def _plausible(given: Array, own: Array, fine: Array) -> Array:
    """What is accepted where there is no bound: what agrees by the sigma rule; anything where the range may end."""
    if given.dtype.kind in "biu":
        return np.ones(given.shape, bool)
    wide = np.complex128 if given.dtype.kind == "c" else np.float64
    mine, there = own.astype(wide), np.asarray(fine).astype(wide)
    regular = np.isfinite(mine) & np.isfinite(there) & (np.abs(there) < largest(own.dtype) / 2)
    scale = LARGEST * sigma(np.where(regular, mine, 0), np.where(regular, there, 0), own.dtype)
    return np.asarray(~regular | (np.abs(given.astype(wide) - mine) <= scale))


def _apart(a: Array, b: Array) -> Array:
    """Distance; none between equal infinities and NaNs, in each part of a complex number, and infinite to others."""
    if a.dtype.kind == "c":
        return np.hypot(_apart(a.real, b.real), _apart(a.imag, b.imag))
    distance = np.where(equal(a, b), 0.0, np.abs(a - b))
    return np.where(np.isnan(distance), np.inf, distance)


def judge(given: Array, own: Array, bounded: Bounded, number: int = 0) -> Finding:
    """Compare one output with the checker's own run and its bounds."""
    tight, hard = bounded.errors()
    wide = np.complex128 if given.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        if given.dtype.kind in "biu":
            same = given == own
            # Two large integers may be one float64.
            apart = np.where(same, 0.0, np.maximum(np.abs(given.astype(wide) - own.astype(wide)), 1.0))
            reference = apart * 0
        else:
            same = equal(given, own)
            fine = bounded.fine.astype(wide)
            apart = np.where(same, 0.0, _apart(given.astype(wide), fine))
            reference = _apart(own.astype(wide), fine)
        within = apart <= np.maximum(tight, np.where(np.isfinite(reference), SPREAD * reference, 0.0))
        accepted = same | np.where(np.isinf(tight), _plausible(given, own, bounded.fine), within)
    if accepted.all():
        limit = np.maximum(tight, SPREAD * np.where(np.isfinite(reference), reference, 0.0))
        at = (apart > 0) & np.isfinite(limit)
        return Finding("accepted", float(np.max(apart[at] / limit[at], initial=0.0)), miss=0.0)
    limit = hard * (BLAME if bounded.soft else 1.0)
    proven = ~accepted & ~(apart <= limit)
    worst = int(np.argmax(np.where(accepted, -1.0, np.where(proven, np.inf, apart))))
    where = tuple(int(i) for i in np.unravel_index(worst, apart.shape))
    place = f"output {number}, element {where}: {given[where]}, the checker has {own[where]}"
    scale = float(tight[where]) if 0 < tight[where] < np.inf else 1.0
    return Finding("wrong" if proven.any() else "unproven", float(apart[where]) / scale, reason=place, miss=0.0)
