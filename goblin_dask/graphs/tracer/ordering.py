"""Rules of functions that order, search and count."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from goblin_dask.errors import NotTraceable
from goblin_dask.graphs.tracer import casting
from goblin_dask.graphs.tracer.array import Tracer
from goblin_dask.graphs.tracer.casting import astype, tracer
from goblin_dask.graphs.tracer.dispatch import known, rule
from goblin_dask.graphs.tracer.recorder import op


def _flat(a: Any, axis: Any) -> tuple[Tracer, int]:
    a = tracer(a)
    if axis is None:
        return casting.reshape(a, (a.size,)), 0
    return a, normalize_axis_index(axis, a.ndim)


def _ordering(name: str) -> Any:
    def recorded(a: Any, axis: Any = -1, kind: Any = None, order: Any = None, *, stable: Any = None) -> Any:
        a, axis = _flat(a, axis)
        return op(name, a, axis=axis, stable=bool(stable) or kind in ("stable", "mergesort"))

    return recorded


def _partial_ordering(name: str) -> Any:
    def recorded(a: Any, kth: Any, axis: Any = -1, kind: str = "introselect", order: Any = None) -> Any:
        a, axis = _flat(a, axis)
        n = a.shape[axis] if a.ndim else 1
        places = [int(each) for each in np.atleast_1d(kth)]
        if any(not -n <= each < n for each in places):
            raise ValueError(f"kth(={kth}) out of bounds ({n})")
        return op(name, a, axis=axis, kth=tuple(each % n for each in places))

    return recorded


rule(np.sort)(_ordering("sort"))
rule(np.argsort)(_ordering("argsort"))
rule(np.partition)(_partial_ordering("partition"))
rule(np.argpartition)(_partial_ordering("argpartition"))


@rule(np.searchsorted)
def searchsorted(a: Any, v: Any, side: str = "left", sorter: Any = None) -> Any:
    if sorter is not None:
        raise NotTraceable("np.searchsorted with sorter=")
    dtype = (
        np.result_type(tracer(a).dtype, tracer(v).dtype)
        if not isinstance(v, (int, float))
        else casting.result_type(a, v)
    )
    return op("searchsorted", tracer(a, dtype), tracer(v, dtype), side=side)


@rule(np.digitize)
def digitize(x: Any, bins: Any, right: bool = False) -> Any:
    return op("digitize", tracer(x), tracer(bins), right=bool(right))


@rule(np.histogram)
def histogram(a: Any, bins: Any = 10, range: Any = None, density: Any = None, weights: Any = None) -> Any:
    a = tracer(a)
    flat = casting.reshape(a, (a.size,))
    operands = [flat] if weights is None else [flat, casting.reshape(tracer(weights), (tracer(weights).size,))]
    if isinstance(bins, Tracer) and bins.ndim == 0:
        bins = int(bins)
    if isinstance(bins, str) or density:
        raise NotTraceable("np.histogram with density= or named bins")
    if isinstance(bins, (Tracer, list, tuple)):
        edges = tracer(bins)
    else:
        if range is None:
            raise NotTraceable("np.histogram without range=: the bins depend on data")
        range = tuple(float(each) if isinstance(each, Tracer) else each for each in range)
        edges = known(np.histogram_bin_edges(np.zeros((0,), a.dtype), bins, range))
    return op("histogram", operands[0], edges, *operands[1:]), edges


@rule(np.bincount)
def bincount(x: Any, /, weights: Any = None, minlength: Any = 0) -> Any:
    """With the length that is asked for; the operator raises for a value that does not fit into it."""
    if not minlength:
        raise NotTraceable("np.bincount without minlength=: the shape of the result depends on data")
    weighted = [] if weights is None else [tracer(weights, np.float64)]
    return op("bincount", tracer(x), *weighted, length=int(minlength))


@rule(np.isin)
def isin(
    element: Any, test_elements: Any, assume_unique: bool = False, invert: bool = False, *, kind: Any = None
) -> Any:
    return op("isin", tracer(element), tracer(test_elements), invert=bool(invert))


@rule(np.interp)
def interp(x: Any, xp: Any, fp: Any, left: Any = None, right: Any = None, period: Any = None) -> Any:
    if left is not None or right is not None or period is not None:
        raise NotTraceable("np.interp with left=, right= or period=")
    return op("interp", tracer(x), tracer(xp), tracer(fp))


@rule(np.lexsort)
def lexsort(keys: Any, axis: int = -1) -> Any:
    raise NotTraceable("np.lexsort is not in the catalogue")


@rule(np.nan_to_num)
def nan_to_num(x: Any, copy: bool = True, nan: Any = 0.0, posinf: Any = None, neginf: Any = None) -> Any:
    x = tracer(x)
    if x.dtype.kind != "f" or not copy:
        raise NotTraceable(f"np.nan_to_num of {x.dtype}")
    info = np.finfo(x.dtype)
    x_ = np.where(np.isnan(x), x.dtype.type(nan), x)
    x_ = np.where(np.equal(x_, np.inf), x.dtype.type(info.max if posinf is None else posinf), x_)
    return np.where(np.equal(x_, -np.inf), x.dtype.type(info.min if neginf is None else neginf), x_)


@rule(np.isclose)
def isclose(a: Any, b: Any, rtol: Any = 1e-05, atol: Any = 1e-08, equal_nan: bool = False) -> Any:
    a, b = tracer(a), tracer(b)
    if b.dtype.kind not in "fc":
        b = astype(b, np.result_type(b.dtype, 1.0))
    near = np.logical_and(np.less_equal(np.abs(a - b), atol + rtol * np.abs(b)), np.isfinite(b))
    near = np.logical_or(near, np.equal(a, b))
    return np.logical_or(near, np.logical_and(np.isnan(a), np.isnan(b))) if equal_nan else near


@rule(np.allclose)
def allclose(a: Any, b: Any, rtol: Any = 1e-05, atol: Any = 1e-08, equal_nan: bool = False) -> Any:
    raise NotTraceable("np.allclose returns a Python bool, which depends on data")
