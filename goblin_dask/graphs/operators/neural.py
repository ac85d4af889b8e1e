"""What the operators of neural networks share: accumulation of halves in float32, and ATen's way to write sizes."""

from __future__ import annotations

import math
from typing import Any

from goblin_dask.errors import InputError
from goblin_dask.graphs.operators import samples
from goblin_dask.graphs.operators.base import Array, Kind, Specs
from goblin_dask.graphs.operators.dtypes import DTYPES, HALVES
from goblin_dask.graphs.operators.rules import Ints
from goblin_dask.messages import ArraySpec

NEURAL = frozenset({Kind.NEURAL})
SIZE = 2**31 - 1
"""Bound of a window's size, stride, padding or dilation."""
MASK = Ints(low=0, high=1)
"""ATen's ``output_mask``: which of the gradients are wanted."""


def wide(dtype: str) -> str:
    """The dtype in which numbers of a dtype are computed with."""
    return "float32" if dtype in HALVES else dtype


def widened(*arrays: Array) -> tuple[Array, ...]:
    """Halves as float32; others as they are."""
    return tuple(array.astype(DTYPES[wide(array.dtype.name)], copy=False) for array in arrays)


def narrowed(array: Array, dtype: Any) -> Array:
    """Back to the dtype of the result, without a copy where it has it."""
    return array.astype(dtype, copy=False)


def wide_bytes(spec: ArraySpec) -> int:
    """Bytes of an array in the dtype in which it is computed with."""
    return math.prod(spec.shape) * DTYPES[wide(spec.dtype)].itemsize


def casts(*specs: ArraySpec) -> int:
    """Bytes of the float32 copies of those that are halves."""
    return sum(wide_bytes(spec) for spec in specs if spec.dtype in HALVES)


def is_floating(dtype: str) -> bool:
    """Whether of real floating-point numbers."""
    return dtype in samples.FLOATS


def require_floating(*specs: ArraySpec) -> None:
    """Refuse operands that are not all of one floating dtype."""
    for spec in specs:
        if not is_floating(spec.dtype):
            raise InputError(f"expected real floating-point numbers, got {spec.dtype}; cast them")
        if spec.dtype != specs[0].dtype:
            raise InputError(f"expected operands of one dtype, got {specs[0].dtype} and {spec.dtype}; cast one of them")


def require_count(specs: Specs, low: int, high: int) -> None:
    """Refuse a wrong number of operands."""
    if not low <= len(specs) <= high:
        raise InputError(f"takes {low} to {high} operands, got {len(specs)}")


def require_shape(spec: ArraySpec, shape: tuple[int, ...], what: str) -> None:
    """Refuse an operand of another shape."""
    if spec.shape != shape:
        raise InputError(f"{what} has shape {spec.shape}, expected {shape}")


def spread(value: Any, rank: int, name: str) -> tuple[int, ...]:
    """A size for each of `rank` axes; ATen lets one stand for all."""
    entries = tuple(value)
    if len(entries) == 1:
        return entries * rank
    if len(entries) != rank:
        raise InputError(f"{name} has {len(entries)} entries, expected 1 or {rank}")
    return entries


def masked(mask: Any, *results: Any) -> tuple[Any, ...]:
    """Those of some results that a mask asks for."""
    if len(mask) != len(results):
        raise InputError(f"output_mask has {len(mask)} entries, expected {len(results)}")
    if not any(mask):
        raise InputError("output_mask asks for nothing")
    return tuple(result for wanted, result in zip(mask, results, strict=True) if wanted)
