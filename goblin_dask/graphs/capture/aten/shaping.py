"""What moves elements and computes none."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from goblin_dask.errors import NotTraceable
from goblin_dask.graphs.capture.aten.base import Call, array, arrays, axes_of, axis_of, expanded, lowers, shaped
from goblin_dask.graphs.tracer.array import Tracer
from goblin_dask.graphs.tracer.casting import astype, broadcast_to
from goblin_dask.graphs.tracer.recorder import op


@lowers("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten._reshape_copy.default")
@lowers("aten.view_copy.default")
def _view(call: Call, x: Tracer, shape: Sequence[Any]) -> Tracer:
    return shaped(x, shape)


@lowers("aten.view.dtype", "aten.view_copy.dtype")
def _view_dtype(call: Call, x: Tracer, dtype: str) -> Tracer:
    return op("bitcast", x, dtype=dtype)


@lowers("aten.permute.default", "aten.permute_copy.default")
def _permute(call: Call, x: Tracer, dims: Sequence[int]) -> Tracer:
    return op("permute_dims", x, axes=axes_of(x, dims) if dims else ())


@lowers("aten.transpose.int")
def _transpose(call: Call, x: Tracer, a: int, b: int) -> Tracer:
    axes = list(range(x.ndim))
    if axes:
        i, j = axis_of(x, a), axis_of(x, b)
        axes[i], axes[j] = axes[j], axes[i]
    return op("permute_dims", x, axes=tuple(axes))


@lowers("aten.t.default")
def _t(call: Call, x: Tracer) -> Tracer:
    return op("permute_dims", x, axes=tuple(reversed(range(x.ndim))))


@lowers("aten.expand.default", "aten.expand_copy.default")
def _expand(call: Call, x: Tracer, shape: Sequence[Any], *, implicit: bool = False) -> Tracer:
    return expanded(x, shape)


@lowers("aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims", "aten.squeeze_copy.default")
@lowers("aten.squeeze_copy.dim", "aten.squeeze_copy.dims")
def _squeeze(call: Call, x: Tracer, dim: Any = None) -> Tracer:
    axes = range(x.ndim) if dim is None else axes_of(x, dim) if x.ndim else ()
    return op("squeeze", x, axes=tuple(axis for axis in axes if x.shape[axis] == 1))


@lowers("aten.unsqueeze.default", "aten.unsqueeze_copy.default")
def _unsqueeze(call: Call, x: Tracer, dim: int) -> Tracer:
    return op("expand_dims", x, axes=(dim % (x.ndim + 1),))


def _bounds(length: int, start: Any, end: Any, step: int) -> tuple[int, int]:
    """First index and number of elements."""
    first, last, _ = slice(None if start is None else int(start), None if end is None else int(end)).indices(length)
    return first, max(0, -(-(last - first) // step))


@lowers("aten.slice.Tensor", "aten.slice_copy.Tensor")
def _slice(call: Call, x: Tracer, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Tracer:
    axis = axis_of(x, dim)
    first, count = _bounds(x.shape[axis], start, end, step)
    return _cut(x, axis, first, count, step)


def _cut(x: Tracer, axis: int, first: int, count: int, step: int = 1) -> Tracer:
    first = first if count else 0
    start = tuple(first if i == axis else 0 for i in range(x.ndim))
    length = tuple(count if i == axis else size for i, size in enumerate(x.shape))
    return op("slice", x, start=start, length=length, step=tuple(step if i == axis else 1 for i in range(x.ndim)))


@lowers("aten.select.int", "aten.select_copy.int")
def _select(call: Call, x: Tracer, dim: int, index: Any) -> Tracer:
    axis = axis_of(x, dim)
    return op("squeeze", _cut(x, axis, int(index) % x.shape[axis], 1), axes=(axis,))


@lowers("aten.narrow.default")
def _narrow(call: Call, x: Tracer, dim: int, start: Any, length: Any) -> Tracer:
    axis = axis_of(x, dim)
    return _cut(x, axis, int(start) % max(x.shape[axis], 1), int(length))


@lowers("aten.split_with_sizes.default", "aten.split_with_sizes_copy.default")
def _split_with_sizes(call: Call, x: Tracer, sizes: Sequence[Any], dim: int = 0) -> tuple[Tracer, ...]:
    axis, counts = axis_of(x, dim), [int(size) for size in sizes]
    return tuple(_cut(x, axis, first, n) for first, n in zip(itertools.accumulate([0, *counts]), counts, strict=False))


@lowers("aten.split.Tensor", "aten.split_copy.Tensor")
def _split(call: Call, x: Tracer, size: Any, dim: int = 0) -> tuple[Tracer, ...]:
    length, size = x.shape[axis_of(x, dim)], int(size)
    sizes = [min(size, length - first) for first in range(0, length, size)] if length else [0]
    return _split_with_sizes(call, x, sizes, dim)


@lowers("aten.unbind.int", "aten.unbind_copy.int")
def _unbind(call: Call, x: Tracer, dim: int = 0) -> tuple[Tracer, ...]:
    return tuple(_select(call, x, dim, i) for i in range(x.shape[axis_of(x, dim)]))


@lowers("aten.cat.default")
def _cat(call: Call, parts: Sequence[Tracer], dim: int = 0) -> Tracer:
    # One-dimensional empty tensors are no parts, whatever the others are.
    real = [part for part in parts if part.shape != (0,)] or list(parts[:1])
    return op("concat", *arrays(call, *real), axis=axis_of(real[0], dim))


@lowers("aten.stack.default")
def _stack(call: Call, parts: Sequence[Tracer], dim: int = 0) -> Tracer:
    return op("stack", *arrays(call, *parts), axis=dim % (parts[0].ndim + 1))


@lowers("aten.flip.default")
def _flip(call: Call, x: Tracer, dims: Sequence[int]) -> Tracer:
    return op("flip", x, axes=axes_of(x, dims)) if dims and x.ndim else x


@lowers("aten.roll.default")
def _roll(call: Call, x: Tracer, shifts: Any, dims: Any = ()) -> Tracer:
    shifts = [int(each) for each in (shifts if isinstance(shifts, Sequence) else (shifts,))]
    if not dims:
        return shaped(op("roll", shaped(x, (-1,)), shift=(shifts[0],), axes=(0,)), x.shape)
    return op("roll", x, shift=tuple(shifts), axes=axes_of(x, dims))


@lowers("aten.repeat.default")
def _repeat(call: Call, x: Tracer, repeats: Sequence[Any]) -> Tracer:
    x = x.reshape((1,) * (len(repeats) - x.ndim) + x.shape)
    return op("tile", x, counts=tuple(int(each) for each in repeats))


@lowers("aten.constant_pad_nd.default")
def _pad(call: Call, x: Tracer, pad: Sequence[Any], value: Any = 0) -> Tracer:
    """From the last axis on; what is negative cuts off."""
    pairs = [(int(a), int(b)) for a, b in zip(pad[::2], pad[1::2], strict=True)][::-1]
    pairs = [(0, 0)] * (x.ndim - len(pairs)) + pairs
    for axis, (before, after) in enumerate(pairs):
        if min(before, after) < 0:
            first = max(-before, 0)
            x = _cut(x, axis, first, x.shape[axis] - first - max(-after, 0))
    width = tuple(max(each, 0) for pair in pairs for each in pair)
    return op("pad", x, array(value, call.dtype), width=width, mode="constant") if any(width) else x


@lowers("aten.diagonal.default", "aten.diagonal_copy.default")
def _diagonal(call: Call, x: Tracer, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tracer:
    return op("diagonal", x, offset=offset, axis1=axis_of(x, dim1), axis2=axis_of(x, dim2))


@lowers("aten.tril.default")
def _tril(call: Call, x: Tracer, diagonal: int = 0) -> Tracer:
    return op("tril", x, k=diagonal)


@lowers("aten.triu.default")
def _triu(call: Call, x: Tracer, diagonal: int = 0) -> Tracer:
    return op("triu", x, k=diagonal)


@lowers("aten.unfold.default", "aten.unfold_copy.default")
def _unfold(call: Call, x: Tracer, dim: int, size: int, step: int) -> Tracer:
    """Windows of an axis, as a last axis."""
    if not x.ndim:
        return _cut(x.reshape((1,)), 0, 0, size)
    axis = axis_of(x, dim)
    count = (x.shape[axis] - size) // step + 1
    parts = [_cut(x, axis, tap, count, step) if step > 1 else _cut(x, axis, tap, count) for tap in range(size)]
    if not parts:
        raise NotTraceable("windows of no elements")
    return op("stack", *parts, axis=x.ndim)


@lowers("aten.slice_scatter.default")
def _slice_scatter(
    call: Call, x: Tracer, part: Tracer, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Tracer:
    axis = axis_of(x, dim)
    first, count = _bounds(x.shape[axis], start, end, step)
    return _put(x, part, axis, first, count, step)


def _put(x: Tracer, part: Tracer, axis: int, first: int, count: int, step: int = 1) -> Tracer:
    start = tuple(first if i == axis else 0 for i in range(x.ndim))
    length = tuple(count if i == axis else size for i, size in enumerate(x.shape))
    steps = tuple(step if i == axis else 1 for i in range(x.ndim))
    part = broadcast_to(astype(part, x.dtype), length)
    return op("setitem", x, part, start=start, length=length, step=steps)


@lowers("aten.select_scatter.default")
def _select_scatter(call: Call, x: Tracer, part: Tracer, dim: int, index: Any) -> Tracer:
    axis = axis_of(x, dim)
    return _put(x, op("expand_dims", part, axes=(axis,)), axis, int(index) % x.shape[axis], 1)


@lowers("aten.sym_size.int")
def _sym_size(call: Call, x: Tracer, dim: int) -> int:
    return x.shape[axis_of(x, dim)]


@lowers("aten.sym_numel.default")
def _sym_numel(call: Call, x: Tracer) -> int:
    return x.size
