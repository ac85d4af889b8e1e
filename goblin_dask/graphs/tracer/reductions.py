"""Rules of reductions: sums, means, extremes, counts, and those that skip NaN."""

from __future__ import annotations

import math
from typing import Any

import numpy
from numpy.lib.array_utils import normalize_axis_index, normalize_axis_tuple

from goblin_dask.errors import NotTraceable
from goblin_dask.graphs.tracer import casting
from goblin_dask.graphs.tracer.array import Tracer
from goblin_dask.graphs.tracer.casting import astype, tracer
from goblin_dask.graphs.tracer.dispatch import rule
from goblin_dask.graphs.tracer.recorder import op

np: Any = numpy
"""NumPy, to be called with tracers, which its annotations do not know."""

NONE = np._NoValue
IDENTITY = {"sum": 0, "prod": 1, "all": True, "any": False}


def axes_of(a: Tracer, axis: Any) -> tuple[int, ...]:
    """Normalised axes; None is all of them."""
    return tuple(range(a.ndim)) if axis is None else normalize_axis_tuple(axis, a.ndim)


def reduce(
    name: str,
    a: Any,
    axis: Any = None,
    dtype: Any = None,
    out: Any = None,
    keepdims: Any = False,
    initial: Any = NONE,
    where: Any = True,
) -> Any:
    """One reduction of the catalogue with all that NumPy's reductions take."""
    a = tracer(a)
    keepdims = keepdims is not NONE and bool(keepdims)
    axes = axes_of(a, axis)
    if where is not True and where is not NONE:
        if name in ("max", "min") and initial is NONE:
            raise ValueError(
                f"reduction operation {name!r} does not have an identity, so to use a where mask specify 'initial'"
            )
        a = np.where(where, a, initial if name in ("max", "min") else IDENTITY[name])
    if name in ("max", "min") and initial in (NONE, None) and 0 in (a.shape[i] for i in axes):
        raise ValueError(f"zero-size array to reduction operation {name} which has no identity")
    result: Tracer
    if name in ("sum", "prod"):
        target = np.dtype(dtype) if dtype is not None else _accumulator(a.dtype)
        result = op(name, a, axes=axes, keepdims=keepdims, dtype=target.name)
    elif 0 in (a.shape[i] for i in axes) and name in ("max", "min"):
        shape = tuple(1 if i in axes else n for i, n in enumerate(a.shape) if keepdims or i not in axes)
        result = casting.broadcast_to(tracer(initial, a.dtype), shape)
        initial = NONE
    else:
        result = op(name, a, axes=axes, keepdims=keepdims)
        if dtype is not None:
            result = astype(result, dtype)
    if initial is not NONE and initial is not None and initial is not IDENTITY.get(name):
        combine: dict[str, Any] = {
            "sum": np.add,
            "prod": np.multiply,
            "max": np.maximum,
            "min": np.minimum,
            "all": np.logical_and,
            "any": np.logical_or,
        }
        result = astype(combine[name](result, initial), result.dtype)
    return into(out, result)


def into(out: Any, result: Tracer) -> Tracer:
    """Assignment of a result to ``out=``."""
    if isinstance(out, tuple):
        (out,) = out
    if out is None or out is NONE:
        return result
    if not isinstance(out, Tracer):
        raise NotTraceable("a result is written into an array that is none of the operands")
    if out.shape != result.shape:
        raise ValueError(f"output array of shape {out.shape} for a result of shape {result.shape}")
    out.become(result)
    return out


def _accumulator(dtype: numpy.dtype[Any]) -> numpy.dtype[Any]:
    wide: numpy.dtype[Any] = np.add.reduce(np.zeros((1,), dtype)).dtype
    return wide


def accumulate(name: str, a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> Any:
    """Running sums and products."""
    a = tracer(a)
    if axis is None:
        a, axis = np.ravel(a), 0
    axis = normalize_axis_index(axis, a.ndim)
    target = np.dtype(dtype) if dtype is not None else _accumulator(a.dtype)
    return into(out, op(name, a, axis=axis, dtype=target.name))


def _reduction(name: str) -> Any:
    def recorded(
        a: Any,
        axis: Any = None,
        dtype: Any = None,
        out: Any = None,
        keepdims: Any = False,
        initial: Any = NONE,
        where: Any = True,
    ) -> Any:
        return reduce(name, a, axis, dtype, out, keepdims, initial, where)

    return recorded


def _extreme(name: str) -> Any:
    def recorded(
        a: Any, axis: Any = None, out: Any = None, keepdims: Any = False, initial: Any = NONE, where: Any = True
    ) -> Any:
        return reduce(name, a, axis, None, out, keepdims, initial, where)

    return recorded


def _logical(name: str) -> Any:
    def recorded(a: Any, axis: Any = None, out: Any = None, keepdims: Any = False, *, where: Any = True) -> Any:
        return reduce(name, a, axis, None, out, keepdims, NONE, where)

    return recorded


rule(np.sum)(_reduction("sum"))
rule(np.prod)(_reduction("prod"))
rule(np.max, np.amax)(_extreme("max"))
rule(np.min, np.amin)(_extreme("min"))
rule(np.all)(_logical("all"))
rule(np.any)(_logical("any"))


@rule(np.cumsum)
def cumsum(a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> Any:
    return accumulate("cumulative_sum", a, axis, dtype, out)


@rule(np.cumprod)
def cumprod(a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> Any:
    return accumulate("cumulative_prod", a, axis, dtype, out)


@rule(np.nancumsum)
def nancumsum(a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> Any:
    return cumsum(_filled(tracer(a), 0), axis, dtype, out)


@rule(np.nancumprod)
def nancumprod(a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> Any:
    return cumprod(_filled(tracer(a), 1), axis, dtype, out)


@rule(np.ptp)
def ptp(a: Any, axis: Any = None, out: Any = None, keepdims: Any = False) -> Any:
    return into(out, np.subtract(reduce("max", a, axis, keepdims=keepdims), reduce("min", a, axis, keepdims=keepdims)))


@rule(np.count_nonzero)
def count_nonzero(a: Any, axis: Any = None, *, keepdims: bool = False) -> Any:
    return reduce("sum", astype(tracer(a), bool), axis, np.intp, keepdims=keepdims)


def _floating(dtype: numpy.dtype[Any]) -> numpy.dtype[Any]:
    return dtype if dtype.kind in "fc" else np.dtype(np.float64)


@rule(np.mean)
def mean(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, *, where: Any = True
) -> Any:
    a = tracer(a)
    target = np.dtype(dtype) if dtype is not None else _floating(a.dtype)
    working = np.dtype(np.float32) if dtype is None and a.dtype == np.float16 else target
    if where is True or where is NONE:
        count: Any = math.prod(a.shape[i] for i in axes_of(a, axis))
    else:
        count = reduce("sum", casting.broadcast_to(tracer(where, bool), a.shape), axis, np.intp, keepdims=keepdims)
    total = reduce("sum", a, axis, working, keepdims=keepdims, where=where)
    return into(out, astype(np.true_divide(total, count), target))


@rule(np.var)
def var(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, ddof: Any = 0, keepdims: Any = False, *,
    where: Any = True, mean: Any = NONE, correction: Any = NONE,
) -> Any:  # fmt: skip
    a = tracer(a)
    if where is not True and where is not NONE:
        raise NotTraceable("np.var with where=")
    ddof = ddof if correction is NONE else correction
    target = np.dtype(dtype) if dtype is not None else _floating(a.dtype)
    working = np.dtype(np.float32) if dtype is None and a.dtype == np.float16 else target
    count = math.prod(a.shape[i] for i in axes_of(a, axis))
    centre = np.true_divide(reduce("sum", a, axis, working, keepdims=True), count) if mean is NONE else mean
    deviation = np.subtract(a, centre)
    squares = (
        np.multiply(deviation, deviation)
        if deviation.dtype.kind != "c"
        else np.square(np.real(deviation)) + np.square(np.imag(deviation))
    )
    if target.kind == "c":
        target = np.zeros((), target).real.dtype
        working = target
    total = reduce("sum", squares, axis, working, keepdims=keepdims)
    return into(out, astype(np.true_divide(total, max(count - ddof, 0)), target))


@rule(np.std)
def std(a: Any, *args: Any, out: Any = None, **kwargs: Any) -> Any:
    return into(out, np.sqrt(var(a, *args, **kwargs)))


# --- skipping NaN -----------------------------------------------------------------------------------------------
def _filled(a: Tracer, value: Any) -> Tracer:
    return np.where(np.isnan(a), a.dtype.type(value), a) if a.dtype.kind in "fc" else a


@rule(np.nansum)
def nansum(
    a: Any,
    axis: Any = None,
    dtype: Any = None,
    out: Any = None,
    keepdims: Any = False,
    initial: Any = NONE,
    where: Any = True,
) -> Any:
    return reduce("sum", _filled(tracer(a), 0), axis, dtype, out, keepdims, initial, where)


@rule(np.nanprod)
def nanprod(
    a: Any,
    axis: Any = None,
    dtype: Any = None,
    out: Any = None,
    keepdims: Any = False,
    initial: Any = NONE,
    where: Any = True,
) -> Any:
    return reduce("prod", _filled(tracer(a), 1), axis, dtype, out, keepdims, initial, where)


def _nan_extreme(name: str, fill: float) -> Any:
    def recorded(
        a: Any, axis: Any = None, out: Any = None, keepdims: Any = False, initial: Any = NONE, where: Any = True
    ) -> Any:
        a = tracer(a)
        if a.dtype.kind == "c":
            raise NotTraceable(f"np.nan{name} of complex numbers")
        if a.dtype.kind != "f":
            return reduce(name, a, axis, None, out, keepdims, initial, where)
        if where is not True and where is not NONE:
            raise NotTraceable(f"np.nan{name} with where=")
        best = reduce(name, _filled(a, fill), axis, None, None, keepdims)
        best = np.where(reduce("all", np.isnan(a), axis, keepdims=keepdims), a.dtype.type(np.nan), best)
        if initial is not NONE:
            best = (np.fmax if name == "max" else np.fmin)(best, initial)
        return into(out, best)

    return recorded


rule(np.nanmax)(_nan_extreme("max", -np.inf))
rule(np.nanmin)(_nan_extreme("min", np.inf))


@rule(np.nanmean)
def nanmean(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, *, where: Any = True
) -> Any:
    a = tracer(a)
    if a.dtype.kind not in "fc" or (where is not True and where is not NONE):
        return mean(a, axis, dtype, out, keepdims, where=where)
    count = reduce("sum", np.logical_not(np.isnan(a)), axis, np.intp, keepdims=keepdims)
    total = reduce("sum", _filled(a, 0), axis, dtype, keepdims=keepdims)
    return into(out, astype(np.true_divide(total, count), total.dtype))


@rule(np.nanvar)
def nanvar(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, ddof: Any = 0, keepdims: Any = False, **kwargs: Any
) -> Any:
    a = tracer(a)
    if a.dtype.kind not in "f" or kwargs.get("where", True) is not True:
        raise NotTraceable("np.nanvar of other than real floating-point numbers")
    nan = np.isnan(a)
    count = reduce("sum", np.logical_not(nan), axis, np.intp, keepdims=True)
    centre = astype(np.true_divide(reduce("sum", _filled(a, 0), axis, dtype, keepdims=True), count), dtype or a.dtype)
    deviation = np.where(nan, a.dtype.type(0), np.subtract(a, centre))
    total = reduce("sum", np.multiply(deviation, deviation), axis, dtype, keepdims=keepdims)
    degrees = reduce("sum", np.logical_not(nan), axis, np.intp, keepdims=keepdims) - ddof
    result = astype(np.true_divide(total, degrees), total.dtype)
    return into(out, np.where(degrees <= 0, result.dtype.type(np.nan), result))


@rule(np.nanstd)
def nanstd(a: Any, *args: Any, **kwargs: Any) -> Any:
    return np.sqrt(nanvar(a, *args, **kwargs))


# --- places -----------------------------------------------------------------------------------------------------
def _argument(name: str) -> Any:
    def recorded(a: Any, axis: Any = None, out: Any = None, *, keepdims: Any = False) -> Any:
        a = tracer(a)
        keepdims = keepdims is not NONE and bool(keepdims)
        if 0 in ([a.shape[axis]] if axis is not None else a.shape):
            raise ValueError(f"attempt to get {name} of an empty sequence")
        if axis is None:
            result = op(name, casting.reshape(a, (a.size,)), axis=0)
            return into(out, casting.reshape(result, (1,) * a.ndim) if keepdims else result)
        return into(out, op(name, a, axis=normalize_axis_index(axis, a.ndim), keepdims=keepdims))

    return recorded


rule(np.argmax)(_argument("argmax"))
rule(np.argmin)(_argument("argmin"))


@rule(np.nanargmax, np.nanargmin)
def _nan_argument(a: Any, axis: Any = None, out: Any = None, *, keepdims: Any = False) -> Any:
    raise NotTraceable("np.nanargmax and np.nanargmin raise where a slice is all NaN: that depends on data")


# --- order statistics -------------------------------------------------------------------------------------------
METHODS = ("linear", "lower", "higher", "nearest", "midpoint")


def _statistic(name: str, a: Any, axis: Any, out: Any, keepdims: Any, *q: Tracer, **attributes: Any) -> Any:
    a = tracer(a)
    axes = axes_of(a, axis)
    if a.dtype.kind not in "biuf" or math.prod(a.shape[i] for i in axes) == 0:
        raise NotTraceable(f"np.{name} of {a.dtype} {a.shape}")
    return into(out, op(name, a, *q, axes=axes, keepdims=keepdims is not NONE and bool(keepdims), **attributes))


def _median(name: str) -> Any:
    def recorded(
        a: Any, axis: Any = None, out: Any = None, overwrite_input: bool = False, keepdims: Any = False
    ) -> Any:
        return _statistic(name, a, axis, out, keepdims)

    return recorded


def _quantile(name: str, scale: int) -> Any:
    def recorded(
        a: Any, q: Any, axis: Any = None, out: Any = None, overwrite_input: bool = False, method: str = "linear",
        keepdims: Any = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        if method not in METHODS or any(value is not None for value in kwargs.values()):
            raise NotTraceable(f"np.{name} with method={method!r} or weights=")
        kind = tracer(a).dtype
        if not isinstance(q, Tracer):
            weak = type(q) in (int, float) and kind.kind == "f"
            q = Tracer.of(np.asarray(q, kind if weak else None))
        if scale > 1:
            q = np.true_divide(q, kind.type(scale) if kind.kind == "f" else scale)
        return _statistic(name, a, axis, out, keepdims, q, method=method)

    return recorded


rule(np.median)(_median("median"))
rule(np.nanmedian)(_median("nanmedian"))
rule(np.percentile)(_quantile("quantile", 100))
rule(np.nanpercentile)(_quantile("nanquantile", 100))
rule(np.quantile)(_quantile("quantile", 1))
rule(np.nanquantile)(_quantile("nanquantile", 1))
