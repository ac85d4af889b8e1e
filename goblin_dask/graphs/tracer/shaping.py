"""Rules of functions that move elements, and of what only looks at shapes and dtypes."""

from __future__ import annotations

import math
from typing import Any

import numpy
from numpy.lib.array_utils import normalize_axis_index, normalize_axis_tuple

from goblin_dask.errors import NotTraceable
from goblin_dask.graphs.tracer import casting
from goblin_dask.graphs.tracer.array import Tracer
from goblin_dask.graphs.tracer.casting import astype, broadcast_to, tracer
from goblin_dask.graphs.tracer.dispatch import known, rule
from goblin_dask.graphs.tracer.making import full_like, shape_of
from goblin_dask.graphs.tracer.recorder import op

np: Any = numpy
"""NumPy, to be called with tracers, which its annotations do not know."""


# --- shape ------------------------------------------------------------------------------------------------------
@rule(np.shape)
def shape(a: Any) -> Any:
    return tracer(a).shape


@rule(np.ndim)
def ndim(a: Any) -> Any:
    return tracer(a).ndim


@rule(np.size)
def size(a: Any, axis: Any = None) -> Any:
    a = tracer(a)
    if axis is None:
        return a.size
    return math.prod(a.shape[i] for i in normalize_axis_tuple(axis, a.ndim))


@rule(np.reshape)
def reshape(a: Any, /, shape: Any, order: str = "C", *, copy: Any = None) -> Any:
    a = tracer(a)
    sizes = (int(shape),) if np.ndim(shape) == 0 else tuple(int(each) for each in shape)
    if order == "F":
        sizes = casting.reshape(a, sizes).shape
        return transpose(casting.reshape(transpose(a), sizes[::-1]))
    if order not in ("C", "A", "K"):
        raise ValueError(f"order must be one of 'C', 'F', 'A', or 'K' (got {order!r})")
    return casting.reshape(a, sizes)


@rule(np.ravel)
def ravel(a: Any, order: str = "C") -> Any:
    return reshape(a, -1 if tracer(a).size else 0, "F" if order == "F" else "C")


@rule(np.transpose, np.permute_dims)
def transpose(a: Any, axes: Any = None) -> Any:
    a = tracer(a)
    if axes is None:
        axes = range(a.ndim)[::-1]
    axes = normalize_axis_tuple(axes, a.ndim)
    if len(axes) != a.ndim:
        raise ValueError("axes don't match array")
    return a.copy() if axes == tuple(range(a.ndim)) else op("permute_dims", a, axes=axes)


@rule(np.swapaxes)
def swapaxes(a: Any, axis1: int, axis2: int) -> Any:
    a = tracer(a)
    axes = list(range(a.ndim))
    i, j = normalize_axis_index(axis1, a.ndim), normalize_axis_index(axis2, a.ndim)
    axes[i], axes[j] = axes[j], axes[i]
    return transpose(a, axes)


@rule(np.squeeze)
def squeeze(a: Any, axis: Any = None) -> Any:
    a = tracer(a)
    axes = [i for i, n in enumerate(a.shape) if n == 1] if axis is None else normalize_axis_tuple(axis, a.ndim)
    if any(a.shape[i] != 1 for i in axes):
        raise ValueError("cannot select an axis to squeeze out which has size not equal to one")
    return op("squeeze", a, axes=tuple(axes)) if axes else a.copy()


@rule(np.expand_dims)
def expand_dims(a: Any, axis: Any) -> Any:
    a = tracer(a)
    axes = normalize_axis_tuple(axis, a.ndim + (len(axis) if isinstance(axis, (tuple, list)) else 1))
    return op("expand_dims", a, axes=axes) if axes else a.copy()


@rule(np.broadcast_to)
def _broadcast_to(array: Any, shape: Any, subok: bool = False) -> Any:
    shape = shape_of(array, shape)
    a = tracer(array)
    if np.broadcast_shapes(a.shape, shape) != shape:
        raise ValueError(f"operands could not be broadcast together with remapped shapes {a.shape} and {shape}")
    return broadcast_to(a, shape)


@rule(np.broadcast_arrays)
def broadcast_arrays(*args: Any, subok: bool = False) -> Any:
    arrays = [tracer(each) for each in args]
    target = np.broadcast_shapes(*(each.shape for each in arrays))
    return tuple(broadcast_to(each, target) for each in arrays)


@rule(np.concatenate, np.concat)
def concatenate(
    arrays: Any, /, axis: Any = 0, out: Any = None, *, dtype: Any = None, casting: str = "same_kind"
) -> Any:
    parts = [tracer(each) for each in arrays]
    if out is not None:
        raise NotTraceable("np.concatenate with out=")
    if axis is None:
        parts, axis = [ravel(each) for each in parts], 0
    ndim = parts[0].ndim
    if ndim == 0:
        raise ValueError("zero-dimensional arrays cannot be concatenated")
    axis = normalize_axis_index(int(axis), ndim)
    for each in parts:
        if each.ndim != ndim or any(
            a != b for i, (a, b) in enumerate(zip(each.shape, parts[0].shape, strict=True)) if i != axis
        ):
            raise ValueError(
                f"all the input array dimensions except for axis {axis} must match: {[p.shape for p in parts]}"
            )
    target = np.dtype(dtype) if dtype is not None else np.result_type(*(each.dtype for each in parts))
    parts = [astype(each, target) for each in parts]
    return parts[0].copy() if len(parts) == 1 else op("concat", *parts, axis=axis)


@rule(np.stack)
def stack(arrays: Any, axis: int = 0, out: Any = None, *, dtype: Any = None, casting: str = "same_kind") -> Any:
    parts = [tracer(each) for each in arrays]
    if len({each.shape for each in parts}) != 1:
        raise ValueError("all input arrays must have the same shape")
    return concatenate(
        [expand_dims(each, axis) for each in parts], normalize_axis_index(axis, parts[0].ndim + 1), out, dtype=dtype
    )


@rule(np.where)
def where(condition: Any, x: Any = None, y: Any = None, /) -> Any:
    if x is None or y is None:
        raise NotTraceable("np.where: the shape of the result depends on data")
    dtype = casting.result_type(x, y)
    return op("where", tracer(condition, bool), tracer(x, dtype), tracer(y, dtype))


@rule(np.repeat)
def repeat(a: Any, repeats: Any, axis: Any = None) -> Any:
    a = tracer(a)
    if axis is None:
        a, axis = ravel(a), 0
    axis = normalize_axis_index(axis, a.ndim)
    counts = np.broadcast_to(tracer(repeats).elements("the number of repetitions"), (a.shape[axis],))
    return take(a, known(np.repeat(np.arange(a.shape[axis]), counts)), axis)


@rule(np.flip)
def flip(m: Any, axis: Any = None) -> Any:
    m = tracer(m)
    axes = tuple(range(m.ndim)) if axis is None else normalize_axis_tuple(axis, m.ndim)
    return op("flip", m, axes=axes) if axes else m.copy()


@rule(np.roll)
def roll(a: Any, shift: Any, axis: Any = None) -> Any:
    a = tracer(a)
    if axis is None:
        return casting.reshape(roll(casting.reshape(a, (a.size,)), shift, 0), a.shape)
    shifts, axes = np.broadcast_arrays(shift, normalize_axis_tuple(axis, a.ndim, allow_duplicate=True))
    for s, i in zip(shifts.ravel().tolist(), axes.ravel().tolist(), strict=True):
        if a.shape[i] and s % a.shape[i]:
            a = op("roll", a, shift=(s % a.shape[i],), axes=(i,))
    return a


@rule(np.pad)
def pad(array: Any, pad_width: Any, mode: Any = "constant", **kwargs: Any) -> Any:
    a = tracer(array)
    value = kwargs.pop("constant_values", 0)
    modes = ("constant", "edge", "reflect", "symmetric", "wrap")
    if mode not in modes or np.ndim(value) or kwargs.pop("reflect_type", "even") != "even" or kwargs:
        raise NotTraceable(f"np.pad with mode={mode!r} and more")
    pairs = np.broadcast_to(np.asarray(pad_width), (a.ndim, 2)).astype(int)
    if (pairs < 0).any():
        raise ValueError("index can't contain negative values")
    filling = [tracer(value, a.dtype)] if mode == "constant" else []
    return op("pad", a, *filling, width=tuple(pairs.ravel().tolist()), mode=mode)


@rule(np.diagonal)
def diagonal(a: Any, offset: int = 0, axis1: int | None = None, axis2: int | None = None) -> Any:
    a = tracer(a)
    axis1 = normalize_axis_index(0 if axis1 is None else axis1, a.ndim)
    axis2 = normalize_axis_index(1 if axis2 is None else axis2, a.ndim)
    return op("diagonal", a, offset=int(offset), axis1=axis1, axis2=axis2)


@rule(np.trace)
def trace(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None, out: Any = None) -> Any:
    return np.sum(diagonal(a, offset, axis1, axis2), axis=-1, dtype=dtype, out=out)


@rule(np.diag)
def diag(v: Any, k: int = 0) -> Any:
    v = tracer(v)
    if v.ndim == 2:
        return diagonal(v, k)
    if v.ndim != 1:
        raise ValueError("Input must be 1- or 2-d.")
    return op("diag", v, offset=int(k))


@rule(np.take)
def take(a: Any, indices: Any, axis: Any = None, out: Any = None, mode: str = "raise") -> Any:
    if out is not None or mode != "raise":
        raise NotTraceable("np.take with out= or mode=")
    a = tracer(a)
    if axis is None:
        a, axis = ravel(a), 0
    axis = normalize_axis_index(axis, a.ndim)
    index = tracer(indices)
    if index.dtype.kind not in "iu":
        raise TypeError(f"Cannot cast array data from {index.dtype!r} to dtype('int64') according to the rule 'safe'")
    return (
        a[(*(slice(None),) * axis, index if index.ndim else index[None])]
        if index.ndim
        else squeeze(a[(*(slice(None),) * axis, index[None])], axis)
    )


@rule(np.lib.stride_tricks.sliding_window_view)
def sliding_window_view(
    x: Any, window_shape: Any, axis: Any = None, *, subok: bool = False, writeable: bool = False
) -> Any:
    x = tracer(x)
    sizes = (int(window_shape),) if np.ndim(window_shape) == 0 else tuple(map(int, window_shape))
    axes = tuple(range(x.ndim)) if axis is None else normalize_axis_tuple(axis, x.ndim, allow_duplicate=True)
    if len(sizes) != len(axes):
        raise ValueError(f"a window of shape {sizes} over the axes {axes}")
    for n, i in zip(sizes, axes, strict=True):
        if not 0 <= n <= x.shape[i]:
            raise ValueError("window shape cannot be larger than input array shape")
        places = np.arange(x.shape[i] - n + 1)[:, None] + np.arange(n)
        x = np.moveaxis(op("take", x, known(places), axis=i), i + 1, -1)
    return x


@rule(np.take_along_axis)
def take_along_axis(arr: Any, indices: Any, axis: Any = -1) -> Any:
    arr, indices = tracer(arr), tracer(indices)
    if axis is None:
        arr, axis = ravel(arr), 0
    axis = normalize_axis_index(axis, arr.ndim)
    target = np.broadcast_shapes(
        tuple(1 if i == axis else n for i, n in enumerate(arr.shape)),
        tuple(1 if i == axis else n for i, n in enumerate(indices.shape)),
    )
    arr = broadcast_to(arr, tuple(arr.shape[i] if i == axis else n for i, n in enumerate(target)))
    indices = broadcast_to(indices, tuple(indices.shape[i] if i == axis else n for i, n in enumerate(target)))
    return op("take_along_axis", arr, indices, axis=axis)


def _part(val: Any, which: int) -> Any:
    """Real or imaginary part: every other number."""
    a = tracer(val)
    numbers = casting.bitcast(expand_dims(a, -1), np.zeros((), a.dtype).real.dtype)
    return numbers[..., which]


@rule(np.real)
def real(val: Any) -> Any:
    return _part(val, 0) if tracer(val).dtype.kind == "c" else tracer(val)


@rule(np.imag)
def imag(val: Any) -> Any:
    return _part(val, 1) if tracer(val).dtype.kind == "c" else full_like(val, 0)


@rule(np.iscomplexobj)
def iscomplexobj(x: Any) -> Any:
    return x.dtype.kind == "c"


@rule(np.result_type)
def result_type(*values: Any) -> Any:
    return np.result_type(*(each.dtype if isinstance(each, Tracer) else each for each in values))


@rule(np.can_cast)
def can_cast(from_: Any, to: Any, casting: str = "safe") -> Any:
    to = to.dtype if isinstance(to, Tracer) else to
    return np.can_cast(from_.dtype if isinstance(from_, Tracer) else from_, to, casting=casting)


@rule(np.may_share_memory, np.shares_memory)
def may_share_memory(a: Any, b: Any, max_work: Any = None) -> Any:
    return a is b


@rule(np.round, np.around)
def round_(a: Any, decimals: int = 0, out: Any = None) -> Any:
    a = tracer(a)
    if a.dtype.kind in "iu" and decimals >= 0:
        result = a.copy()
    elif a.dtype.kind != "f":
        raise NotTraceable(f"np.round of {a.dtype} to {decimals} decimals")
    elif decimals == 0:
        result = np.rint(a)
    else:
        # NumPy's own steps, so that the bits are NumPy's.
        factor = a.dtype.type(10.0 ** abs(decimals))
        result = np.rint(a * factor) / factor if decimals > 0 else np.rint(a / factor) * factor
    if out is not None:
        out.become(result)
        return out
    return result


@rule(np.clip)
def clip(
    a: Any,
    a_min: Any = np._NoValue,
    a_max: Any = np._NoValue,
    out: Any = None,
    *,
    min: Any = np._NoValue,
    max: Any = np._NoValue,
    **kwargs: Any,
) -> Any:
    low, high = (next((b for b in pair if b is not np._NoValue), None) for pair in ((a_min, min), (a_max, max)))
    a = tracer(a)
    for bound in (low, high):
        if type(bound) is int and a.dtype.kind in "iu" and not np.iinfo(a.dtype).min <= bound <= np.iinfo(a.dtype).max:
            raise NotTraceable("np.clip with a bound outside of the dtype")
    if low is None or high is None:
        result = a.copy() if low is high is None else np.maximum(a, low) if high is None else np.minimum(a, high)
    else:
        dtype = casting.result_type(a, low, high)
        result = op("clip", astype(a, dtype), tracer(low, dtype), tracer(high, dtype))
    if kwargs.get("dtype") is not None:
        result = astype(result, kwargs["dtype"])
    if out is not None:
        out = out[0] if isinstance(out, tuple) else out
        out.become(result)
        return out
    return result


@rule(np.tril)
def tril(m: Any, k: int = 0) -> Any:
    return op("tril", tracer(m), k=int(k))


@rule(np.triu)
def triu(m: Any, k: int = 0) -> Any:
    return op("triu", tracer(m), k=int(k))


@rule(np.choose)
def choose(a: Any, choices: Any, out: Any = None, mode: str = "raise") -> Any:
    raise NotTraceable("np.choose is not in the catalogue")


@rule(np.ravel_multi_index)
def ravel_multi_index(multi_index: Any, dims: Any, mode: Any = "raise", order: str = "C") -> Any:
    if order != "C" or mode != "raise":
        raise NotTraceable("np.ravel_multi_index with mode= or order=")
    total: Any = 0
    for index, n in zip(multi_index, dims, strict=True):
        total = total * int(n) + (astype(index, np.intp) if isinstance(index, Tracer) else index)
    return total


@rule(np.unravel_index)
def unravel_index(indices: Any, shape: Any, order: str = "C") -> Any:
    if order != "C":
        raise NotTraceable("np.unravel_index with order=")
    index, result = astype(tracer(indices), np.intp), []
    for n in tuple(shape)[::-1]:
        result.append(index % int(n))
        index = index // int(n)
    return tuple(result[::-1])
