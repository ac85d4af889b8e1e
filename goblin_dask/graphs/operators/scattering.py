"""`gather` and its adjoints: elements by an index of their own, as ATen has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from goblin_dask.errors import InputError
from goblin_dask.graphs.operators import samples
from goblin_dask.graphs.operators.base import (
    Array,
    Example,
    Kind,
    Operator,
    Specs,
    added_in,
    check_count,
    like,
    require_axis,
    require_integers,
)
from goblin_dask.graphs.operators.dtypes import DTYPES
from goblin_dask.graphs.operators.neural import (
    narrowed,
    wide,
    wide_bytes,
)
from goblin_dask.graphs.operators.rules import Axis, Bool, Choice

KINDS = frozenset({Kind.NEURAL, Kind.INDEXING})
REDUCTIONS = ("set", "sum", "prod", "mean", "amax", "amin")


def within(index: Array, size: int, what: str) -> Array:
    """The index as int64, when each of its numbers is one of `size`.

    Raises
    ------
    InputError
        With the smallest and the largest number, when not.
    """
    if index.size:
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= size:
            raise InputError(f"{what} from {low} to {high}, expected 0 to {size - 1}")
    return index.astype("int64", copy=False)


def _require_index(specs: Specs, dim: int) -> None:
    """An index no larger than the array in any axis but one."""
    require_integers(specs[1])
    shape, index = specs[0].shape, specs[1].shape
    check_count("the index's shape", len(index), len(shape))
    if any(i > n for axis, (i, n) in enumerate(zip(index, shape, strict=True)) if axis != dim):
        raise InputError(f"the index {index} is larger than the array {shape} in another axis than {dim}")
    if shape[dim] == 0 and 0 not in index:
        raise InputError(f"axis {dim} is empty: there is nothing to choose")


def _infer_gather(specs: Specs, a: Any) -> Specs:
    dim = require_axis(specs, {"axis": a["dim"]})
    _require_index(specs, dim)
    return like(specs[0], specs[1].shape)


def _corner(shape: tuple[int, ...], dim: int | None = None) -> tuple[slice, ...]:
    """The elements of an array that lie in the shape of an index; the whole axis `dim`."""
    return tuple(slice(None) if axis == dim else slice(size) for axis, size in enumerate(shape))


def _gather(xp: Any, operands: tuple[Array, ...], a: Any) -> tuple[Array, ...]:
    array, dim = operands[0], a["dim"]
    index = within(operands[1], array.shape[dim], "indices")
    return (xp.take_along_axis(array[_corner(index.shape, dim)], index, axis=dim),)


def _infer_scatter(specs: Specs, a: Any) -> Specs:
    dim = require_axis(specs, {"axis": a["dim"]})
    _require_index(specs, dim)
    check_count("the source's shape", len(specs[2].shape), len(specs[0].shape))
    if specs[2].dtype != specs[0].dtype:
        raise InputError(f"a source of {specs[2].dtype} for an array of {specs[0].dtype}; cast it")
    if any(i > n for i, n in zip(specs[1].shape, specs[2].shape, strict=True)):
        raise InputError(f"the index {specs[1].shape} is larger than the source {specs[2].shape}")
    reduce = a.get("reduce", "sum")
    if DTYPES[specs[0].dtype].kind == "c" and reduce in ("mean", "amax", "amin"):
        raise InputError(f"complex numbers have no {reduce} here")
    if specs[0].dtype == "bool" and reduce != "set":
        raise InputError(f"booleans have no {reduce}; cast them")
    return (specs[0],)


def _identity(reduce: str, dtype: Any) -> Any:
    if reduce in ("sum", "mean"):
        return 0
    if reduce == "prod":
        return 1
    least = reduce == "amax"
    if dtype.kind in "iu":
        return np.iinfo(dtype).min if least else np.iinfo(dtype).max
    return -np.inf if least else np.inf


_UFUNC = {"sum": "add", "mean": "add", "prod": "multiply", "amax": "maximum", "amin": "minimum"}


def _scatter(xp: Any, operands: tuple[Array, ...], a: Any) -> tuple[Array, ...]:
    array, dim, reduce = operands[0], a["dim"], a.get("reduce", "sum")
    index = within(operands[1], array.shape[dim], "indices")
    result = array.astype(DTYPES[wide(array.dtype.name)], order="C")
    if not index.size:
        return (narrowed(result, array.dtype),)
    source = operands[2][_corner(index.shape)].astype(result.dtype, copy=False)
    key = list(xp.ogrid[_corner(index.shape)])
    key[dim] = index
    where = tuple(key)
    if reduce == "set":
        result[where] = source
        return (narrowed(result, array.dtype),)
    if not a.get("include_self", True):
        result[where] = result.dtype.type(_identity(reduce, result.dtype))
    getattr(xp, _UFUNC[reduce]).at(result, where, source)
    if reduce == "mean":
        count = xp.zeros(result.shape, "int64")
        xp.add.at(count, where, 1)
        count += 1 if a.get("include_self", True) else count == 0
        result = result // count if result.dtype.kind in "iu" else result / count.astype(result.dtype)
    return (result.astype(array.dtype, copy=False),)


def _workspace_scatter(specs: Specs, outputs: Specs, a: Any) -> int:
    mean = a.get("reduce") == "mean"
    size, index = math.prod(specs[0].shape), math.prod(specs[1].shape)
    # `ufunc.at` and assignment by index broadcast one index an axis and buffer what they cast.
    return (
        wide_bytes(specs[0])
        + 2 * index * DTYPES[wide(specs[2].dtype)].itemsize
        + 8 * index * (2 + len(specs[0].shape))
        + (2 * 8 * size + wide_bytes(specs[0]) + size if mean else 0)
        + 65_536
    )


# --- examples ---------------------------------------------------------------------------------------------------
_INDICES: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...] = (
    ((4, 3), (2, 3), 0),
    ((4, 3), (4, 5), 1),
    ((4, 3), (1, 1), -1),
    ((2, 3, 4), (2, 2, 3), 1),
    ((5,), (7,), 0),
    ((3, 2), (0, 2), 0),
    ((2, 0), (2, 0), 1),
)


def _indexed(dtypes: tuple[str, ...]) -> Iterator[tuple[Array, Array, int]]:
    for seed, dtype in enumerate(dtypes):
        for shape, index, dim in _INDICES:
            rng = np.random.default_rng((seed, *shape))
            places = rng.integers(0, max(1, shape[dim]), index)
            yield samples.sample(shape, dtype, seed, special=False), places, dim


def _examples_gather() -> Iterator[Example]:
    for array, index, dim in _indexed(samples.ALL):
        yield (array, index), {"dim": dim}
        yield (samples.strided(array), samples.strided(index)), {"dim": dim}


_SCATTERED = ("bfloat16", "float16", "float32", "float64", "int32", "uint8")


def _examples_scatter(reductions: tuple[str, ...]) -> Callable[[], Iterator[Example]]:
    def examples() -> Iterator[Example]:
        for array, index, dim in _indexed(_SCATTERED):
            shape = tuple(size + 1 for size in index.shape)
            source = samples.sample(shape, array.dtype.name, 4, special=False)
            if not reductions:
                yield (array, index, source), {"dim": dim}
                yield (samples.strided(array), index, samples.strided(source)), {"dim": dim}
            for reduce in reductions:
                if reduce == "set":  # where an index is twice, ATen leaves open which is set
                    count = min(index.shape[dim], array.shape[dim])
                    few = np.argsort(np.random.default_rng(3).random(index.shape), axis=dim)
                    few = np.take(few, range(count), axis=dim)
                    few = np.argsort(np.argsort(few, axis=dim), axis=dim)
                    yield (array, few, source), {"dim": dim, "reduce": reduce}
                    continue
                for include in (True, False):
                    yield (array, index, source), {"dim": dim, "reduce": reduce, "include_self": include}

    return examples


def copies_of_index(specs: Specs, outputs: Specs, a: Any) -> int:
    """Of an index: as int64, and broadcast for each axis."""
    return 8 * (2 + len(specs[1].shape)) * math.prod(specs[1].shape) + 8 * sum(outputs[0].shape)


OPERATORS: tuple[Operator, ...] = added_in(
    2,
    Operator(
        "gather",
        "Elements of an axis by an index of the result's shape.",
        KINDS,
        _infer_gather,
        _gather,
        _examples_gather,
        arity=2,
        attributes={"dim": Axis()},
        workspace=copies_of_index,
        contiguous=True,
    ),
    Operator(
        "scatter_reduce",
        "A copy of the first operand with the third's elements set, or reduced, at the second's indices of an axis.",
        KINDS,
        _infer_scatter,
        _scatter,
        _examples_scatter(REDUCTIONS),
        arity=3,
        attributes={"dim": Axis(), "reduce": Choice(options=REDUCTIONS), "include_self": Bool(True)},
        workspace=_workspace_scatter,
        contiguous=True,
    ),
    Operator(
        "scatter_add",
        "A copy of the first operand with the third's elements added at the second's indices of an axis.",
        KINDS,
        _infer_scatter,
        _scatter,
        _examples_scatter(()),
        arity=3,
        attributes={"dim": Axis()},
        workspace=_workspace_scatter,
        contiguous=True,
    ),
)
