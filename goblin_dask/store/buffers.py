"""Arrays as bytes and bytes as arrays: C order, little-endian, bit for bit, without copying where it can be helped."""

from __future__ import annotations

import math
import sys
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from goblin_dask.errors import DigestMismatch, InputError
from goblin_dask.messages import ArraySpec

_KINDS = "biufcmM"
"""NumPy's kinds whose elements are plain numbers of a fixed size: bool, integers, float, complex, time spans, dates."""

Array = npt.NDArray[Any]


def dtype_name(dtype: npt.DTypeLike) -> str:
    """Name of a dtype in an `ArraySpec`.

    Raises
    ------
    InputError
        For objects, strings, records and extended precision, by name.
    """
    dtype = np.dtype(dtype)
    if dtype == ml_dtypes.bfloat16:
        return "bfloat16"
    if dtype.kind not in _KINDS or dtype.itemsize > 16 or dtype.char in "gG":
        what = {"O": "objects", "U": "strings", "S": "strings", "T": "strings"}.get(dtype.kind, "records")
        what = "extended precision, which differs between machines" if dtype.char in "gG" else what
        raise InputError(
            f"arrays of dtype {dtype} ({what}) can be neither stored nor computed with here; "
            "convert to numbers of a fixed size, e.g. by astype('float64'), or store each field as its own array"
        )
    return dtype.newbyteorder("=").name if dtype.kind not in "mM" else dtype.newbyteorder("<").str


def dtype_of(name: str) -> np.dtype[Any]:
    """The dtype of an `ArraySpec`, little-endian."""
    if name == "bfloat16":
        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    try:
        dtype = np.dtype(name)
        if dtype_name(dtype) == name:
            return np.dtype(dtype.newbyteorder("<"))
    except TypeError:
        pass
    raise InputError(f"no dtype is called {name!r}; NumPy's names are meant, such as 'float32'")


def nbytes(spec: ArraySpec) -> int:
    """Bytes of the blob of an array."""
    return math.prod(spec.shape) * dtype_of(spec.dtype).itemsize


def spec_of(array: Array) -> ArraySpec:
    """Shape and dtype of an array."""
    return ArraySpec(tuple(int(n) for n in array.shape), dtype_name(array.dtype))


def buffer_of(array: Array) -> memoryview:
    """The blob of an array: a flat read-only view of it, or of a copy when it is not C-ordered and little-endian."""
    array = np.asarray(array)
    dtype_name(array.dtype)
    if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and sys.byteorder == "big"):
        array = array.astype(array.dtype.newbyteorder("<"))
    # reshape(-1) of a non-contiguous array copies; the view as bytes never changes a NaN's payload
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(flat.data).toreadonly()


def array_of(data: Any, spec: ArraySpec) -> Array:
    """The array whose blob is `data`: read-only, without a copy.

    Raises
    ------
    DigestMismatch
        When `data` has not the length that `spec` needs.
    """
    view = memoryview(data)
    if view.nbytes != nbytes(spec):
        raise DigestMismatch(
            f"a blob of {view.nbytes} bytes cannot be an array of shape {spec.shape} and dtype {spec.dtype}, "
            f"which has {nbytes(spec)}"
        )
    array = np.frombuffer(view, dtype=np.uint8).view(dtype_of(spec.dtype)).reshape(spec.shape)
    array.flags.writeable = False
    return array
