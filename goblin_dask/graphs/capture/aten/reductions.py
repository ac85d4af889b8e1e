"""What makes axes disappear, running reductions, and orders."""

from __future__ import annotations

import math
from typing import Any

from goblin_dask.graphs.capture.aten.base import Call, array, axes_of, axis_of, lowers, ordered
from goblin_dask.graphs.tracer.array import Tracer
from goblin_dask.graphs.tracer.casting import astype
from goblin_dask.graphs.tracer.recorder import op, ops


def _wide(dtype: str) -> str:
    """The dtype in which ATen sums numbers of a dtype."""
    return "float32" if dtype in ("float16", "bfloat16") else dtype


@lowers("aten.sum.default", "aten.sum.dim_IntList")
def _sum(call: Call, x: Tracer, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tracer:
    x = array(x, call.dtype)
    return astype(op("sum", array(x, _wide(call.dtype)), axes=axes_of(x, dim), keepdims=keepdim), call.dtype)


@lowers("aten.mean.default", "aten.mean.dim")
def _mean(call: Call, x: Tracer, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tracer:
    x = array(x, call.dtype)
    return astype(op("mean", array(x, _wide(call.dtype)), axes=axes_of(x, dim), keepdims=keepdim), call.dtype)


@lowers("aten.prod.default", "aten.prod.dim_int")
def _prod(call: Call, x: Tracer, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tracer:
    return op("prod", array(x, call.dtype), axes=axes_of(x, dim), keepdims=keepdim)


@lowers("aten.amax.default", "aten.max.default")
def _amax(call: Call, x: Tracer, dim: Any = None, keepdim: bool = False) -> Tracer:
    return op("max", x, axes=axes_of(x, dim), keepdims=keepdim)


@lowers("aten.amin.default", "aten.min.default")
def _amin(call: Call, x: Tracer, dim: Any = None, keepdim: bool = False) -> Tracer:
    return op("min", x, axes=axes_of(x, dim), keepdims=keepdim)


def _extreme(name: str) -> Any:
    def lower(call: Call, x: Tracer, dim: int, keepdim: bool = False) -> tuple[Tracer, Tracer]:
        if not x.ndim:
            return x, array(0, "int64")
        axis = axis_of(x, dim)
        where = op(f"arg{name}", x, axis=axis, keepdims=True)
        value = op("take_along_axis", x, where, axis=axis)
        return (value, where) if keepdim else (op("squeeze", value, axes=(axis,)), op("squeeze", where, axes=(axis,)))

    return lower


lowers("aten.max.dim")(_extreme("max"))
lowers("aten.min.dim")(_extreme("min"))


def _position(name: str) -> Any:
    def lower(call: Call, x: Tracer, dim: int | None = None, keepdim: bool = False) -> Tracer:
        if not x.ndim:
            return array(0, "int64")
        return op(name, x, axis=None if dim is None else axis_of(x, dim), keepdims=keepdim)

    return lower


lowers("aten.argmax.default")(_position("argmax"))
lowers("aten.argmin.default")(_position("argmin"))


@lowers("aten.any.default", "aten.any.dim", "aten.any.dims")
def _any(call: Call, x: Tracer, dim: Any = None, keepdim: bool = False) -> Tracer:
    return astype(op("any", x, axes=axes_of(x, dim), keepdims=keepdim), call.dtype)


@lowers("aten.all.default", "aten.all.dim", "aten.all.dims")
def _all(call: Call, x: Tracer, dim: Any = None, keepdim: bool = False) -> Tracer:
    return astype(op("all", x, axes=axes_of(x, dim), keepdims=keepdim), call.dtype)


@lowers("aten.count_nonzero.default", "aten.count_nonzero.dim_IntList")
def _count_nonzero(call: Call, x: Tracer, dim: Any = None) -> Tracer:
    return op("count_nonzero", x, axes=axes_of(x, dim))


@lowers("aten.var.correction", "aten.var.dim")
def _var(call: Call, x: Tracer, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tracer:
    correction = 1 if correction is None else correction
    wide = array(x, _wide(x.dtype.name))
    return astype(op("var", wide, axes=axes_of(x, dim), correction=float(correction), keepdims=keepdim), call.dtype)


@lowers("aten.std.correction")
def _std(call: Call, x: Tracer, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tracer:
    wide = array(x, _wide(x.dtype.name))
    correction = 1.0 if correction is None else float(correction)
    return astype(
        op("sqrt", op("var", wide, axes=axes_of(x, dim), correction=correction, keepdims=keepdim)), call.dtype
    )


@lowers("aten.var_mean.correction")
def _var_mean(call: Call, x: Tracer, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return _var(call, x, dim, correction=correction, keepdim=keepdim), astype(
        op("mean", array(x, _wide(x.dtype.name)), axes=axes_of(x, dim), keepdims=keepdim), x.dtype
    )


@lowers("aten.linalg_vector_norm.default")
def vector_norm(
    call: Call, x: Tracer, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tracer:
    axes = axes_of(x, dim)
    size = op("abs", array(x, dtype) if dtype is not None else x)
    size = array(size, _wide(call.dtype))
    if ord == math.inf:
        result = op("max", size, axes=axes, keepdims=keepdim)
    elif ord == -math.inf:
        result = op("min", size, axes=axes, keepdims=keepdim)
    elif ord == 0:
        counted = op("not_equal", size, array(0, size.dtype.name))
        result = op("sum", astype(counted, size.dtype), axes=axes, keepdims=keepdim)
    elif ord == 1:
        result = op("sum", size, axes=axes, keepdims=keepdim)
    elif ord == 2:
        result = op("sqrt", op("sum", op("multiply", size, size), axes=axes, keepdims=keepdim))
    else:
        powers = op("pow", size, array(float(ord), size.dtype.name))
        total = op("sum", powers, axes=axes, keepdims=keepdim)
        result = op("pow", total, array(1.0 / ord, size.dtype.name))
    return astype(result, call.dtype)


@lowers("aten.logsumexp.default")
def _logsumexp(call: Call, x: Tracer, dim: Any, keepdim: bool = False) -> Tracer:
    x = array(x, call.dtype)
    axes = axes_of(x, dim)
    top = op("max", x, axes=axes, keepdims=True)
    top = op("where", op("isfinite", top), top, array(0, top.dtype.name))
    total = op("sum", op("exp", op("subtract", x, top)), axes=axes, keepdims=True)
    result = op("add", op("log", total), top)
    return result if keepdim else op("squeeze", result, axes=axes)


@lowers("aten.cumsum.default")
def _cumsum(call: Call, x: Tracer, dim: int, *, dtype: Any = None) -> Tracer:
    return op("cumulative_sum", array(x, call.dtype), axis=axis_of(x, dim)) if x.ndim else array(x, call.dtype)


@lowers("aten.cumprod.default")
def _cumprod(call: Call, x: Tracer, dim: int, *, dtype: Any = None) -> Tracer:
    return op("cumulative_prod", array(x, call.dtype), axis=axis_of(x, dim)) if x.ndim else array(x, call.dtype)


@lowers("aten.sort.default", "aten.sort.stable")
def _sort(call: Call, x: Tracer, dim: int = -1, descending: bool = False, *, stable: Any = None) -> Any:
    if not x.ndim:
        return x, array(0, "int64")
    axis = axis_of(x, dim)
    if descending:
        return _topk(call, x, x.shape[axis], dim)
    order = op("argsort", ordered(x), axis=axis, stable=True)
    return op("take_along_axis", x, order, axis=axis), order


@lowers("aten.topk.default")
def _topk(call: Call, x: Tracer, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if not x.ndim:
        return x, array(0, "int64")
    values, order = ops("topk", ordered(x), axis=axis_of(x, dim), k=int(k), largest=largest)
    return astype(values, x.dtype), order
