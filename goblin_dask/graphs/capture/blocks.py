"""A captured program over Dask arrays, block by block along the batch.

Blocks can be put together where every element of the batch has one of each result, which depends on no other: both are
tried, the latter on drawn data, for every recording that the blocks need.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dask.array as da
import numpy as np

from goblin_dask.errors import InputError
from goblin_dask.graphs.capture.alike import alike
from goblin_dask.graphs.tracer.array import Tracer
from goblin_dask.messages import ArraySpec

if TYPE_CHECKING:
    from goblin_dask.graphs.capture.captured import CapturedProgram
    from goblin_dask.graphs.capture.recordings import Recordings

BATCH = "batch"
"""Name of its axis among the others."""

CLOSENESS = 0.1
"""Parts of a batch give what the whole does within this part of what a program and its module may differ by: they are
the same kernels on the same numbers."""


class Block:
    """The program as a function of one block of the batch: on NumPy's arrays, or on tracers when it is recorded.

    Arguments come and results go with the batch as the first axis.
    """

    def __init__(
        self,
        recordings: Recordings,
        leaves: Sequence[int],
        axes: Sequence[int],
        fixed: Sequence[Any],
        lengths: Sequence[int],
    ):
        self._recordings = recordings.bare()
        self._leaves = tuple(leaves)
        """Which leaves of the arguments the first arrays are."""
        self._axes = tuple(axes)
        """Of the batch, in each result."""
        self._fixed = list(fixed)
        """Leaves that are no arrays."""
        self._lengths = frozenset(lengths)
        """Of blocks, beside those for which the open recording holds."""

    __name__ = "captured"

    def __call__(self, *arrays: Any) -> Any:
        recordings, count = self._recordings, len(self._leaves)
        leaves = list(self._fixed)
        for number, array in zip(self._leaves, arrays[:count], strict=True):
            batched = recordings.batched[number]
            if batched and array.shape[0] not in self._lengths and not recordings.hold(array.shape[0]):
                raise InputError(
                    f"a block has a batch of {array.shape[0]}, which its array did not say, and for which the captured "
                    "recording does not hold: call compute_chunk_sizes on the array first"
                )
            leaves[number] = np.moveaxis(array, 0, recordings.axis) if batched else array
        named = dict(zip(recordings.reads, arrays[count:], strict=True))
        traced = any(isinstance(array, Tracer) for array in arrays)
        found = (recordings.evaluate if traced else recordings.compute)(leaves, named, None)
        results = tuple(np.moveaxis(each, axis, 0) for each, axis in zip(found, self._axes, strict=True))
        return results if len(results) > 1 else results[0]


def over_blocks(captured: CapturedProgram, values: Sequence[Any], arrays: Mapping[str, Any]) -> list[Any]:
    """The leaves of the result as Dask arrays.

    Raises
    ------
    InputError
        Where blocks cannot be put together: a result has no batch, or its elements depend on others of the batch.
    """
    if captured.recordings.open.sizes is None:
        raise InputError("this program was captured with dynamic_batch=False, and takes no blocks of a batch")
    operands, signature, leaves, axes_of = [], [], [], []
    for number, value in enumerate(values):
        if not hasattr(value, "dtype"):
            continue
        array = value if isinstance(value, da.Array) else da.from_array(value, chunks=-1)
        batched = captured.batched[number]
        if batched:
            array = da.moveaxis(array, captured.batch_axis, 0)
        names = [BATCH if batched and not axis else f"i{number}x{axis}" for axis in range(array.ndim)]
        operands.append(array.rechunk({axis: -1 for axis, name in enumerate(names) if name != BATCH}))
        axes_of.append(names)
        signature.append(",".join(name for name in names if name != BATCH))
        leaves.append(number)
    chunks, unified = da.core.unify_chunks(*itertools.chain.from_iterable(zip(operands, axes_of, strict=True)))
    operands, lengths = list(unified), chunks[BATCH]
    known = list(dict.fromkeys(int(length) for length in lengths if not math.isnan(length)))
    if any(map(math.isnan, lengths)):
        known += [size for size in captured.recordings.small() if size not in known]  # any block may be so small
    specs, axes = _results(captured, known)
    if len(lengths) > 1:
        _require_apart(captured.recordings, axes, known, sum(lengths))
    for number, array in enumerate(arrays.values()):
        operands.append(da.from_array(array, chunks=-1))
        signature.append(",".join(f"p{number}x{axis}" for axis in range(array.ndim)))
    results, sizes = [], {}
    for number, (spec, axis) in enumerate(zip(specs, axes, strict=True)):
        names = []
        for place, length in enumerate(spec.shape):
            if place != axis:
                names.append(f"o{number}x{place}")
                sizes[names[-1]] = length
        results.append(",".join(names))
    fixed = [None if hasattr(value, "dtype") else value for value in values]
    found = da.apply_gufunc(
        Block(captured.recordings, leaves, axes, fixed, known),
        ",".join(f"({each})" for each in signature) + "->" + ",".join(f"({each})" for each in results),
        *operands,
        output_dtypes=[np.dtype(spec.dtype) for spec in specs],
        output_sizes=sizes,
    )
    found = found if isinstance(found, tuple) else (found,)
    return [da.moveaxis(each, 0, axis) for each, axis in zip(found, axes, strict=True)]


# --- one element of a result for each of the batch --------------------------------------------------------------------
def _results(captured: CapturedProgram, known: Sequence[int]) -> tuple[list[ArraySpec], list[int]]:
    """Specs of the results of some block, and which axis of each is the batch."""
    recordings = captured.recordings
    first, second = itertools.islice(dict.fromkeys((*known, *_small(recordings), recordings.sizes.recorded + 1)), 2)
    specs, others = (_arrays_only(captured.specs_of_results(size)) for size in (first, second))
    axes = [_batch_axis(number, (first, second), a, b) for number, (a, b) in enumerate(zip(specs, others, strict=True))]
    for size in known:
        if recordings.hold(size):
            continue
        own = _arrays_only(captured.specs_of_results(size))
        if recordings.graph_of(size).structure != recordings.open.structure or own != [
            ArraySpec((*spec.shape[:axis], size, *spec.shape[axis + 1 :]), spec.dtype)
            for spec, axis in zip(specs, axes, strict=True)
        ]:
            raise InputError(
                f"a batch of {size} has other results than one of {first}: blocks of a Dask array cannot be put "
                "together, call it batch by batch"
            )
    return specs, axes


def _small(recordings: Recordings) -> Iterator[int]:
    """Sizes of a batch for which the open recording holds: small ones, and multiples of the one that was recorded."""
    recorded = recordings.sizes.recorded
    return filter(recordings.hold, (*range(2, 34), *range(recorded, 9 * recorded, recorded)))


def _arrays_only(specs: Sequence[ArraySpec | None]) -> list[ArraySpec]:
    found = [spec for spec in specs if spec is not None]
    if len(found) != len(specs):
        raise InputError("a result is no array: blocks of a batch cannot be put together, call it batch by batch")
    return found


def _batch_axis(number: int, sizes: tuple[int, int], a: ArraySpec, b: ArraySpec) -> int:
    """The axis that is as long as the batch, of a result's specs for two sizes of it.

    Raises
    ------
    InputError
        Where there is none, or more than one.
    """
    if len(a.shape) == len(b.shape):
        lengths = list(enumerate(zip(a.shape, b.shape, strict=True)))
        grown = [axis for axis, pair in lengths if pair == sizes]
        if len(grown) == 1 and grown == [axis for axis, (one, other) in lengths if one != other]:
            return grown[0]
    raise InputError(
        f"result {number} of shape {b.shape} for a batch of {sizes[1]} does not have one element of an axis "
        "for each of the batch: blocks of a Dask array cannot be put together, call it batch by batch"
    )


# --- which depends on no other ----------------------------------------------------------------------------------------
def _require_apart(recordings: Recordings, axes: Sequence[int], known: Sequence[int], whole: float) -> None:
    """Compare a batch with its parts on drawn data, once for every recording.

    Raises
    ------
    InputError
        Where they are not alike.
    """
    if not math.isnan(whole) and not recordings.hold(int(whole)):
        raise InputError(
            f"a batch of {whole:.0f} is not computed as its blocks are, for the captured recording holds where "
            f"{recordings.sizes.broken(int(whole))}: call it batch by batch"
        )
    for size in (None, *(size for size in known if size and not recordings.hold(size))):
        if size in recordings.apart:
            continue
        first = [size] if size else list(_small(recordings))
        pairs = ((a, b) for a, b in itertools.product(first, _small(recordings)) if recordings.hold(a + b))
        pair = next(pairs, None)
        if pair is None or not _is_apart(recordings, axes, *pair):
            raise InputError(
                "elements of the batch depend on each other, or on how many there are, so that blocks would not give "
                "what PyTorch does: call it batch by batch, or on arrays of one block along the batch"
            )
        recordings.apart.add(size)


def _is_apart(recordings: Recordings, axes: Sequence[int], first: int, second: int) -> bool:
    """Whether two parts of a batch, one after the other, give what the whole gives."""
    leaves = recordings.drawn(first + second)

    def computed(part: slice) -> list[Any]:
        where = (*(slice(None),) * recordings.axis, part)
        own = [leaf[where] if has else leaf for leaf, has in zip(leaves, recordings.batched, strict=True)]
        return recordings.compute(own, recordings.parameters, None)

    whole, *parts = (computed(part) for part in (slice(None), slice(first), slice(first, None)))
    for number, axis in enumerate(axes):
        joined = np.concatenate([part[number] for part in parts], axis)
        if joined.shape != whole[number].shape or not alike(joined, whole[number], CLOSENESS):
            return False
    return True
