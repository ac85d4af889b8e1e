"""A captured program over Dask arrays, block by block along the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dask.array as da
import numpy as np

from goblin_dask.errors import InputError
from goblin_dask.graphs.tracer.array import Tracer
from goblin_dask.messages import ArraySpec

if TYPE_CHECKING:
    from goblin_dask.graphs.capture.captured import CapturedProgram

PROBES = (2, 3)
"""Sizes of the batch that are compared, to find the axis of a result that grows with it."""


class Block:
    """The program as a function of one block of the batch: on NumPy's arrays, or on tracers when it is recorded.

    Arguments come and results go with the batch as the first axis.
    """

    def __init__(self, captured: CapturedProgram, leaves: Sequence[int], axes: Sequence[int], fixed: Sequence[Any]):
        self._captured = captured
        self._leaves = tuple(leaves)
        """Which leaves of the arguments the first arrays are."""
        self._axes = tuple(axes)
        """Of the batch, in each result."""
        self._fixed = list(fixed)
        """Leaves that are no arrays."""

    __name__ = "captured"

    def __call__(self, *arrays: Any) -> Any:
        captured, count = self._captured, len(self._leaves)
        leaves = list(self._fixed)
        for number, array in zip(self._leaves, arrays[:count], strict=True):
            batched = captured.batched[number]
            leaves[number] = np.moveaxis(array, 0, captured.batch_axis) if batched else array
        named = dict(zip(captured.parameters, arrays[count:], strict=True))
        traced = any(isinstance(array, Tracer) for array in arrays)
        found = captured.evaluate(leaves, named, None) if traced else captured.compute(leaves, named, None)
        results = tuple(np.moveaxis(each, axis, 0) for each, axis in zip(found, self._axes, strict=True))
        return results if len(results) > 1 else results[0]


def over_blocks(captured: CapturedProgram, values: Sequence[Any], arrays: Mapping[str, Any]) -> list[Any]:
    """The leaves of the result as Dask arrays.

    Raises
    ------
    InputError
        Where a result has no batch, so that blocks cannot be put together.
    """
    small, large = (_arrays_only(captured.specs_of_results(batch)) for batch in PROBES)
    axes = [_batch_axis(number, a, b) for number, (a, b) in enumerate(zip(small, large, strict=True))]
    operands, signature, leaves = [], [], []
    for number, value in enumerate(values):
        if not hasattr(value, "dtype"):
            continue
        array = value if isinstance(value, da.Array) else da.from_array(value, chunks=-1)
        batched = captured.batched[number]
        if batched:
            array = da.moveaxis(array, captured.batch_axis, 0)
        core = range(1 if batched else 0, array.ndim)
        operands.append(array.rechunk(dict.fromkeys(core, -1)))
        signature.append(",".join(f"i{number}x{axis}" for axis in core))
        leaves.append(number)
    for number, array in enumerate(arrays.values()):
        operands.append(da.from_array(array, chunks=-1))
        signature.append(",".join(f"p{number}x{axis}" for axis in range(array.ndim)))
    results, sizes = [], {}
    for number, (spec, axis) in enumerate(zip(small, axes, strict=True)):
        names = []
        for place, length in enumerate(spec.shape):
            if place != axis:
                names.append(f"o{number}x{place}")
                sizes[names[-1]] = length
        results.append(",".join(names))
    fixed = [None if hasattr(value, "dtype") else value for value in values]
    found = da.apply_gufunc(
        Block(captured, leaves, axes, fixed),
        ",".join(f"({each})" for each in signature) + "->" + ",".join(f"({each})" for each in results),
        *operands,
        output_dtypes=[np.dtype(spec.dtype) for spec in small],
        output_sizes=sizes,
    )
    found = found if isinstance(found, tuple) else (found,)
    return [da.moveaxis(each, 0, axis) for each, axis in zip(found, axes, strict=True)]


def _arrays_only(specs: Sequence[ArraySpec | None]) -> list[ArraySpec]:
    found = [spec for spec in specs if spec is not None]
    if len(found) != len(specs):
        raise InputError("a result is no array: blocks of a batch cannot be put together, call it batch by batch")
    return found


def _batch_axis(number: int, small: ArraySpec, large: ArraySpec) -> int:
    """The axis that grows with the batch.

    Raises
    ------
    InputError
        Where there is none, or more than one.
    """
    grown = [axis for axis, (a, b) in enumerate(zip(small.shape, large.shape, strict=True)) if (a, b) == PROBES]
    other = [axis for axis, (a, b) in enumerate(zip(small.shape, large.shape, strict=True)) if a != b]
    if len(grown) != 1 or other != grown:
        raise InputError(
            f"result {number} of shape {large.shape} for a batch of {PROBES[1]} does not have one element of an axis "
            "for each of the batch: blocks of a Dask array cannot be put together, call it batch by batch"
        )
    return grown[0]
