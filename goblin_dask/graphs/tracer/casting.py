"""Operands of a recording: what functions are given beside tracers, and in which dtype."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from goblin_dask.errors import NotTraceable
from goblin_dask.graphs.tracer.array import Tracer
from goblin_dask.graphs.tracer.recorder import op

PYTHON_SCALARS = (bool, int, float, complex)


def is_real_tracer(value: Any) -> bool:
    """Whether a value is an array whose elements are not known."""
    return isinstance(value, Tracer) and not value.is_known


def tracer(value: Any, dtype: Any = None) -> Tracer:
    """`value` as a tracer, as ``np.asarray`` would make an array of it.

    Raises
    ------
    NotTraceable
        For an array that is none of the task's operands and was not found either: it was made inside of the function
        by means that may give another one at the next call.
    """
    if not isinstance(value, Tracer):
        if isinstance(value, np.ndarray):
            raise NotTraceable("the function uses an array that is none of its operands")
        if isinstance(value, (list, tuple)) and contains_tracer(value):
            parts = [tracer(each) for each in value]
            value = np.stack(parts)
        elif isinstance(value, (list, tuple)) and _contains_array(value):
            raise NotTraceable("the function uses an array that is none of its operands")
        else:
            array = np.asarray(value, dtype)
            if array.dtype.kind not in "biufc":
                raise NotTraceable(f"the function uses {type(value).__name__} {value!r:.60} as an array")
            value = Tracer.of(array)
    return value if dtype is None else astype(value, dtype)


def contains_tracer(value: Any) -> bool:
    """Whether a nested list or tuple holds a tracer."""
    if isinstance(value, (list, tuple)):
        return any(map(contains_tracer, value))
    return isinstance(value, Tracer)


def _contains_array(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_contains_array, value))
    return isinstance(value, np.ndarray)


def astype(value: Tracer, dtype: Any) -> Tracer:
    """Cast, as NumPy's unsafe one."""
    dtype = np.dtype(dtype)
    if dtype == value.dtype:
        return value
    if value.is_known and value.literal is None:
        with np.errstate(all="ignore"):
            return Tracer.of(value._known.astype(dtype), value.literals)
    return op("astype", value, dtype=dtype.name)


def bitcast(value: Tracer, dtype: np.dtype[Any]) -> Tracer:
    """The same bits in another dtype."""
    return op("bitcast", value, dtype=dtype.name)


def broadcast_to(value: Tracer, shape: tuple[int, ...]) -> Tracer:
    """As NumPy's."""
    if value.shape == shape:
        return value
    np.broadcast_shapes(value.shape, shape)
    if value.is_known and value.literal is None:
        return Tracer.of(np.broadcast_to(value._known, shape), value.literals)
    return op("broadcast_to", value, shape=shape)


def reshape(value: Tracer, shape: tuple[int, ...]) -> Tracer:
    """Reshape in C order; one size may be -1."""
    if -1 in shape:
        known = math.prod(size for size in shape if size != -1)
        if shape.count(-1) > 1 or (known == 0 and value.size) or (known and value.size % known) or not known:
            raise ValueError(f"cannot reshape array of size {value.size} into shape {shape}")
        shape = tuple(value.size // known if size == -1 else size for size in shape)
    if math.prod(shape) != value.size:
        raise ValueError(f"cannot reshape array of size {value.size} into shape {shape}")
    if value.is_known and value.literal is None:
        return Tracer.of(value._known.reshape(shape), value.literals)
    return value.copy() if shape == value.shape else op("reshape", value, shape=shape)


def weak(value: Any) -> Any:
    """What `numpy.result_type` takes for a value: Python's numbers weakly, everything else by its dtype."""
    if isinstance(value, Tracer):
        return value.dtype
    if type(value) in (int, float, complex):
        return value
    return tracer(value).dtype


def result_type(*values: Any) -> np.dtype[Any]:
    """NumPy's promotion of tracers, NumPy scalars and Python scalars."""
    return np.result_type(*map(weak, values))
