"""The dtypes that volunteers compute with, and NumPy's promotion of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from goblin_dask.errors import InputError

DTYPES: Mapping[str, np.dtype[Any]] = {
    name: np.dtype(name)
    for name in (
        [
            "bool",
            "int8",
            "int16",
            "int32",
            "int64",
            "uint8",
            "uint16",
            "uint32",
            "uint64",
            "float16",
            "float32",
            "float64",
            "complex64",
            "complex128",
        ]
    )
} | {"bfloat16": np.dtype(ml_dtypes.bfloat16)}
"""By `ArraySpec.dtype`."""

HALVES = frozenset({"float16", "bfloat16"})
"""Contractions of these accumulate in float32."""


def named(dtype: Any) -> str:
    """The catalogue's name of a dtype.

    Raises
    ------
    InputError
        For any other: dates, strings, objects, structures.
    """
    dtype = np.dtype(dtype)
    name: str = dtype.name
    if name not in DTYPES or not dtype.isnative:
        raise InputError(
            f"no array of dtype {dtype} is computed on volunteers; cast it to a number of native byte order"
        )
    return name


def returned(function: Callable[..., Any], *dtypes: str) -> tuple[str, ...]:
    """Dtypes that `function` returns for arrays of one element: NumPy's own rules instead of a copy of them."""
    with np.errstate(all="ignore"):
        result = function(*(np.ones((1,), DTYPES[dtype]) for dtype in dtypes))
    return tuple(named(np.asarray(r).dtype) for r in (result if isinstance(result, tuple) else (result,)))


probe = lru_cache(maxsize=16384)(returned)
"""`returned`, remembered: for functions that live as long as their module."""


def common(*dtypes: str) -> str:
    """NumPy's promotion; bfloat16's is that of a sum."""
    first = dtypes[0]
    for dtype in dtypes[1:]:
        if dtype != first:
            first = _pair(first, dtype)
    return first


@lru_cache(maxsize=512)
def _pair(a: str, b: str) -> str:
    if "bfloat16" in (a, b):
        return probe(np.add, a, b)[0]
    return named(np.result_type(DTYPES[a], DTYPES[b]))
