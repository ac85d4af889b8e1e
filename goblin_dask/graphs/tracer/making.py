"""Rules of functions that make arrays, copy them and write into them."""

from __future__ import annotations

from typing import Any

import array_api_compat.numpy
import numpy

from goblin_dask.errors import NotTraceable
from goblin_dask.graphs.tracer import casting
from goblin_dask.graphs.tracer.array import Tracer
from goblin_dask.graphs.tracer.casting import astype, broadcast_to, contains_tracer, tracer
from goblin_dask.graphs.tracer.dispatch import known, rule
from goblin_dask.graphs.tracer.rebind import stand_in
from goblin_dask.graphs.tracer.recorder import current, op

np: Any = numpy
"""NumPy, to be called with tracers, which its annotations do not know."""


# --- making -----------------------------------------------------------------------------------------------------
@stand_in(np.asarray, np.asanyarray, np.ascontiguousarray, np.asfortranarray, np.asarray_chkfinite)
def asarray(
    a: Any, dtype: Any = None, order: Any = None, *, copy: Any = None, device: Any = None, like: Any = None
) -> Any:
    """`numpy.asarray`, which leaves tracers what they are."""
    if isinstance(a, Tracer):
        return a if dtype is None else astype(a, dtype)
    if contains_tracer(a):
        return tracer(a, dtype)
    if isinstance(a, np.ndarray):
        return a
    return known(np.asarray(a, dtype))


@stand_in(np.array)
def array(
    a: Any,
    dtype: Any = None,
    *,
    copy: Any = True,
    order: Any = "K",
    subok: bool = False,
    ndmin: int = 0,
    ndmax: int = 0,
    like: Any = None,
) -> Any:
    """`numpy.array`."""
    result = asarray(a, dtype)
    if isinstance(result, Tracer):
        if result.ndim < ndmin:
            result = casting.reshape(result, (1,) * (ndmin - result.ndim) + result.shape)
        return result.copy() if copy in (True, np._CopyMode.ALWAYS) and result is a else result
    return result


@stand_in(np.from_dlpack)
def from_dlpack(x: Any, /, *, device: Any = None, copy: Any = None) -> Any:
    """`numpy.from_dlpack` of one of NumPy's arrays."""
    return asarray(x)


@stand_in(array_api_compat.array_namespace)
def array_namespace(*arrays: Any, api_version: str | None = None, use_compat: bool | None = None) -> Any:
    """`array_api_compat.array_namespace`, to which tracers are NumPy's arrays."""
    return current().rebind(np if use_compat is False else array_api_compat.numpy)


@rule(np.asarray, np.asanyarray, np.ascontiguousarray, np.asfortranarray)
def _asarray_like(a: Any, *args: Any, **kwargs: Any) -> Any:
    return asarray(a, *args, **kwargs)


@rule(np.array)
def _array_like(a: Any, *args: Any, **kwargs: Any) -> Any:
    return array(a, *args, **kwargs)


def shape_of(prototype: Any, shape: Any) -> tuple[int, ...]:
    """A shape as NumPy takes it; None is the prototype's."""
    if shape is None:
        return tuple(prototype.shape)
    return (int(shape),) if not isinstance(shape, (tuple, list)) and np.ndim(shape) == 0 else tuple(map(int, shape))


@rule(np.zeros_like, np.empty_like)
def zeros_like(
    a: Any, dtype: Any = None, order: Any = "K", subok: bool = True, shape: Any = None, *, device: Any = None
) -> Any:
    return full_like(a, 0, dtype, shape=shape)


@rule(np.ones_like)
def ones_like(
    a: Any, dtype: Any = None, order: Any = "K", subok: bool = True, shape: Any = None, *, device: Any = None
) -> Any:
    return full_like(a, 1, dtype, shape=shape)


@rule(np.full_like)
def full_like(
    a: Any,
    fill_value: Any,
    dtype: Any = None,
    order: Any = "K",
    subok: bool = True,
    shape: Any = None,
    *,
    device: Any = None,
) -> Any:
    a = tracer(a)
    dtype = np.dtype(a.dtype if dtype is None else dtype)
    if dtype.kind not in "biufc":
        raise TypeError(f"an array of dtype {dtype} is not computed on volunteers")
    if isinstance(fill_value, Tracer):
        return broadcast_to(astype(fill_value, dtype), shape_of(a, shape))
    # A view of one element; it becomes real only where it is stored into.
    return Tracer.of(np.broadcast_to(np.full((), fill_value, dtype), shape_of(a, shape)))


for _creation in (np.zeros, np.ones, np.empty):

    def _filled(
        shape: Any, dtype: Any = float, order: Any = "C", *, device: Any = None, like: Any = None, _f: Any = _creation
    ) -> Any:
        fill = np.ones if _f is np.ones else np.zeros
        return known(np.broadcast_to(fill((), dtype), shape_of(None, shape)))

    stand_in(_creation)(_filled)
    rule(_creation)(_filled)


@rule(np.arange)
def _arange(*args: Any, like: Any = None, **kwargs: Any) -> Any:
    return known(np.arange(*args, **kwargs))


@rule(np.eye, np.identity, np.full, np.tri)
def _made(*args: Any, like: Any = None, **kwargs: Any) -> Any:
    raise NotTraceable("an array whose entries depend on data is made")


@rule(np.copy)
def copy(a: Any, order: str = "K", subok: bool = False) -> Any:
    return tracer(a).copy()


@rule(np.astype)
def _astype(x: Any, dtype: Any, /, *, copy: bool = True, device: Any = None) -> Any:
    return tracer(x).astype(dtype, copy=copy)


@rule(np.copyto)
def copyto(dst: Any, src: Any, casting: str = "same_kind", where: Any = True) -> None:
    if not isinstance(dst, Tracer):
        raise NotTraceable("values are copied into an array that is none of the operands")
    if type(src) not in (int, float, complex) and not np.can_cast(tracer(src).dtype, dst.dtype, casting=casting):
        raise TypeError(f"Cannot cast array data from {tracer(src).dtype} to {dst.dtype} according to {casting!r}")
    source = tracer(src, dst.dtype)
    dst.become(source if where is True else op("where", tracer(where, bool), source, dst))


@rule(np.putmask)
def putmask(a: Tracer, mask: Any, values: Any) -> None:
    values = tracer(values, a.dtype)
    if values.size != 1:
        raise NotTraceable("np.putmask with several values")
    a.become(op("where", tracer(mask, bool), casting.reshape(values, ()), a))
