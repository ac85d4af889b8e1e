"""Elements chosen, and put, by arrays of indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from goblin_dask.errors import NotTraceable
from goblin_dask.graphs.capture.aten.base import Call, array, axis_of, lowers, ordered, shaped
from goblin_dask.graphs.tracer.array import Tracer
from goblin_dask.graphs.tracer.casting import astype, broadcast_to
from goblin_dask.graphs.tracer.recorder import op


def _chosen(x: Tracer, indices: Sequence[Any]) -> tuple[list[int], list[Tracer]]:
    """Axes that are indexed, and by what."""
    axes, arrays, axis = [], [], 0
    for index in indices:
        if index is None:
            axis += 1
            continue
        if index.dtype.kind == "b":
            raise NotTraceable("a boolean mask makes an array whose length depends on data")
        axes.append(axis)
        arrays.append(astype(index, "int64"))
        axis += 1
    return axes, arrays


def _front(x: Tracer, axes: list[int]) -> tuple[Tracer, tuple[int, ...]]:
    """An array with the indexed axes side by side, where the first of them is, and the order of its axes."""
    if axes == list(range(axes[0], axes[-1] + 1)):
        return x, tuple(range(x.ndim))
    order = (*axes, *(axis for axis in range(x.ndim) if axis not in axes))
    return op("permute_dims", x, axes=order), order


@lowers("aten.index.Tensor", "aten._unsafe_index.Tensor")
def _index(call: Call, x: Tracer, indices: Sequence[Any]) -> Tracer:
    axes, arrays = _chosen(x, indices)
    if not axes:
        return x
    moved, order = _front(x, axes)
    return op("index", moved, *arrays, axis=axes[0] if order == tuple(range(x.ndim)) else 0)


@lowers("aten.index_put.default", "aten._unsafe_index_put.default", "aten._index_put_impl.default")
def _index_put(
    call: Call, x: Tracer, indices: Sequence[Any], values: Tracer, accumulate: bool = False, unsafe: bool = False
) -> Tracer:
    masks = [index for index in indices if index is not None and index.dtype.kind == "b"]
    if masks:
        return _masked_put(x, indices, values, accumulate)
    axes, arrays = _chosen(x, indices)
    if not axes:
        return op("add", x, values) if accumulate else broadcast_to(values, x.shape)
    moved, order = _front(x, axes)
    axis = axes[0] if order == tuple(range(x.ndim)) else 0
    result = op("index_put", moved, astype(values, x.dtype), *arrays, axis=axis, accumulate=accumulate)
    back = tuple(int(each) for each in np.argsort(order))
    return result if order == tuple(range(x.ndim)) else op("permute_dims", result, axes=back)


def _masked_put(x: Tracer, indices: Sequence[Any], values: Tracer, accumulate: bool) -> Tracer:
    """One number where a mask says so; many would go where data decide."""
    (mask,) = indices if len(indices) == 1 else (None,)
    if mask is None or values.size != 1:
        raise NotTraceable("a boolean mask chooses as many elements as data decide")
    mask = mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
    value = astype(values, x.dtype).reshape(())
    return op("where", mask, op("add", x, value) if accumulate else value, x)


@lowers("aten.index_select.default")
def _index_select(call: Call, x: Tracer, dim: int, index: Tracer) -> Tracer:
    if not x.ndim:
        return x
    return op("take", x, index.reshape((index.size,)), axis=axis_of(x, dim))


@lowers("aten.take.default")
def _take(call: Call, x: Tracer, index: Tracer) -> Tracer:
    return _index(call, x.reshape((x.size,)), [index])


@lowers("aten.gather.default")
def _gather(call: Call, x: Tracer, dim: int, index: Tracer, *, sparse_grad: bool = False) -> Tracer:
    if not index.size:
        return broadcast_to(array(0, x.dtype.name), index.shape)
    if not x.ndim:
        return broadcast_to(x, index.shape)
    if not index.ndim:
        return shaped(op("gather", x, shaped(index, (1,)), dim=0), ())
    return op("gather", x, index, dim=axis_of(x, dim))


def _scattered(x: Tracer, dim: int, index: Tracer, source: Tracer, **attributes: Any) -> Tracer:
    if not index.size:
        return x
    if not x.ndim:
        flat = _scattered(shaped(x, (1,)), 0, shaped(index, (-1,)), shaped(source, (-1,)), **attributes)
        return shaped(flat, ())
    if not index.ndim:
        index, source = index.reshape((1,)), source.reshape((1,))
    source = astype(source, x.dtype)
    if source.shape != index.shape:  # only as much of it as is indexed
        source = source[tuple(slice(0, n) for n in index.shape)]
    if x.dtype.kind == "b" and attributes["reduce"] != "set":  # true is the larger one
        bits = op("scatter_reduce", array(x, "uint8"), index, array(source, "uint8"), dim=axis_of(x, dim), **attributes)
        return astype(bits, "bool")
    return op("scatter_reduce", x, index, source, dim=axis_of(x, dim), **attributes)


@lowers("aten.scatter.src")
def _scatter(call: Call, x: Tracer, dim: int, index: Tracer, source: Tracer) -> Tracer:
    return _scattered(x, dim, index, source, reduce="set")


@lowers("aten.scatter.value")
def _scatter_value(call: Call, x: Tracer, dim: int, index: Tracer, value: Any) -> Tracer:
    return _scattered(x, dim, index, broadcast_to(array(value, call.dtype), index.shape), reduce="set")


@lowers("aten.scatter.reduce")
def _scatter_with(call: Call, x: Tracer, dim: int, index: Tracer, source: Tracer, *, reduce: str) -> Tracer:
    name = {"add": "sum", "multiply": "prod"}[reduce]
    return _scattered(x, dim, index, source, reduce=name)


@lowers("aten.scatter.value_reduce")
def _scatter_value_with(call: Call, x: Tracer, dim: int, index: Tracer, value: Any, *, reduce: str) -> Tracer:
    source = broadcast_to(array(value, call.dtype), index.shape)
    return _scatter_with(call, x, dim, index, source, reduce=reduce)


@lowers("aten.scatter_add.default")
def _scatter_add(call: Call, x: Tracer, dim: int, index: Tracer, source: Tracer) -> Tracer:
    return _scattered(x, dim, index, source, reduce="sum")


@lowers("aten.scatter_reduce.two")
def _scatter_reduce(
    call: Call, x: Tracer, dim: int, index: Tracer, source: Tracer, reduce: str, *, include_self: bool = True
) -> Tracer:
    return _scattered(x, dim, index, source, reduce=reduce, include_self=include_self)


@lowers("aten.index_add.default")
def _index_add(call: Call, x: Tracer, dim: int, index: Tracer, source: Tracer, *, alpha: Any = 1) -> Tracer:
    axis = axis_of(x, dim)
    if not x.ndim:
        flat = _index_add(call, shaped(x, (1,)), 0, shaped(index, (-1,)), shaped(source, (-1,)), alpha=alpha)
        return shaped(flat, ())
    source = op("multiply", source, array(alpha, source.dtype.name)) if alpha != 1 else source
    return _index_put(call, x, [*(None,) * axis, index.reshape((index.size,))], source, accumulate=True)


@lowers("aten.searchsorted.Tensor")
def _searchsorted(
    call: Call,
    edges: Tracer,
    x: Tracer,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: Any = None,
    sorter: Any = None,
) -> Tracer:
    if edges.ndim != 1 or sorter is not None:
        raise NotTraceable("searchsorted of several rows, or with a sorter")
    edges, x = ordered(edges), ordered(x)
    found = op("searchsorted", edges, x, side="right" if right or side == "right" else "left")
    return astype(found, call.dtype)
