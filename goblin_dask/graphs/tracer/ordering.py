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


@rule(np.sort)
def sort(a: Any, axis: Any = -1, kind: Any = None, order: Any = None, *, stable: Any = None) -> Any:
    a, axis = _flat(a, axis)
    return op("sort", a, axis=axis)


@rule(np.argsort)
def argsort(a: Any, axis: Any = -1, kind: Any = None, order: Any = None, *, stable: Any = None) -> Any:
    a, axis = _flat(a, axis)
    return op("argsort", a, axis=axis)


@rule(np.partition)
def partition(a: Any, kth: Any, axis: Any = -1, kind: str = "introselect", order: Any = None) -> Any:
    """Sorted whole: a partition's order within its parts is nobody's promise."""
    return sort(a, axis)


@rule(np.argpartition)
def argpartition(a: Any, kth: Any, axis: Any = -1, kind: str = "introselect", order: Any = None) -> Any:
    return argsort(a, axis)


@rule(np.searchsorted)
def searchsorted(a: Any, v: Any, side: str = "left", sorter: Any = None) -> Any:
    if sorter is not None:
        raise NotTraceable("np.searchsorted with sorter=")
    dtype = np.result_type(tracer(a).dtype, tracer(v).dtype) if not isinstance(v, (int, float)) else casting.result_type(a, v)
    return op("searchsorted", tracer(a, dtype), tracer(v, dtype), side=side)


@rule(np.digitize)
def digitize(x: Any, bins: Any, right: bool = False) -> Any:
    bins = tracer(bins)
    edges = bins.elements("the order of bins")
    if edges.size == 0:
        raise NotTraceable("np.digitize without bins")
    x = tracer(x)
    if np.all(edges[1:] >= edges[:-1]):
        return searchsorted(bins, x, side="left" if right else "right")
    if not np.all(edges[1:] <= edges[:-1]):
        raise ValueError("bins must be monotonically increasing or decreasing")
    return edges.size - searchsorted(Tracer.of(edges[::-1].copy(), bins.literals), x, side="right" if right else "left")


@rule(np.histogram)
def histogram(a: Any, bins: Any = 10, range: Any = None, density: Any = None, weights: Any = None) -> Any:
    """Counts by sorting and searching: NumPy's rule that the last bin is closed included."""
    if density or weights is not None or isinstance(bins, str):
        raise NotTraceable("np.histogram with density=, weights= or named bins")
    a = tracer(a)
    if isinstance(bins, Tracer):
        bins = bins.elements("the order of bins") if bins.ndim else int(bins)
    if isinstance(range, (list, tuple)):
        range = tuple(float(each) if isinstance(each, Tracer) else each for each in range)
    if np.ndim(bins) == 0 and range is None:
        raise NotTraceable("np.histogram without range=: the bins depend on data")
    if a.dtype.kind == "b" or a.dtype.kind == "c":
        raise NotTraceable(f"np.histogram of {a.dtype}")
    edges = np.histogram_bin_edges(np.zeros((0,), a.dtype), bins, range)
    ordered = op("sort", casting.reshape(a, (a.size,)), axis=0)
    below = searchsorted(known(edges[:-1].copy()) if False else ordered, known(edges[:-1].copy()), side="left")
    end = searchsorted(ordered, known(edges[-1:].copy()), side="right")
    return np.diff(np.concatenate([below, end])), known(edges)


@rule(np.bincount)
def bincount(x: Any, /, weights: Any = None, minlength: Any = 0) -> Any:
    raise NotTraceable("np.bincount: the shape of the result depends on data")


@rule(np.isin)
def isin(element: Any, test_elements: Any, assume_unique: bool = False, invert: bool = False, *, kind: Any = None) -> Any:
    element, tests = tracer(element), tracer(test_elements)
    if element.size * tests.size > 2**24:
        raise NotTraceable("np.isin against many elements")
    flat = casting.reshape(tests, (tests.size,))
    found = np.any(np.equal(element[..., None], flat), axis=-1)
    return np.logical_not(found) if invert else found


@rule(np.interp)
def interp(x: Any, xp: Any, fp: Any, left: Any = None, right: Any = None, period: Any = None) -> Any:
    raise NotTraceable("np.interp is not in the catalogue")


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
