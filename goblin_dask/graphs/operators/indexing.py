"""Elements chosen by operands of integers."""

from __future__ import annotations

import math
from collections.abc import Iterator
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
    broadcast,
    check_count,
    like,
    nbytes,
    ordered_operator,
    require_axis,
    require_integers,
)
from goblin_dask.graphs.operators.contraction import c_order
from goblin_dask.graphs.operators.rules import Axis, Bool, Shape
from goblin_dask.messages import ArraySpec

INDEXING = frozenset({Kind.INDEXING})


def indices(array: Array) -> Array:
    """NumPy refuses uint64 as an index."""
    return array.astype("int64") if array.dtype.name == "uint64" else array


def _infer_take(specs: Specs, attributes: Any) -> Specs:
    axis, shape = require_axis(specs, attributes), specs[0].shape
    require_integers(specs[1])
    if shape[axis] == 0 and 0 not in specs[1].shape:
        raise InputError(f"axis {axis} is empty: there is nothing to take")
    return like(specs[0], (*shape[:axis], *specs[1].shape, *shape[axis + 1 :]))


def _take(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    return (xp.take(operands[0], indices(operands[1]), axis=attributes["axis"]),)


def _along(specs: Specs, attributes: Any) -> tuple[int, ...]:
    """Shape of the elements that an index along an axis chooses."""
    axis, shape, index = require_axis(specs, attributes), specs[0].shape, specs[1].shape
    require_integers(specs[1])
    check_count("the index's shape", len(index), len(shape))
    if shape[axis] == 0 and index[axis]:
        raise InputError(f"axis {axis} is empty: there is nothing to choose")
    outer = broadcast((*shape[:axis], 1, *shape[axis + 1 :]), (*index[:axis], 1, *index[axis + 1 :]))
    return (*outer[:axis], index[axis], *outer[axis + 1 :])


def _infer_take_along(specs: Specs, attributes: Any) -> Specs:
    return like(specs[0], _along(specs, attributes))


def _infer_scatter(specs: Specs, attributes: Any) -> Specs:
    chosen, axis = _along(specs, attributes), attributes["axis"]
    if any(size != specs[0].shape[i] for i, size in enumerate(chosen) if i != axis):
        raise InputError("the index is larger than the array")
    if broadcast(specs[2].shape, chosen) != chosen:
        raise InputError(f"the values do not broadcast to the index's shape {chosen}")
    return (specs[0],)


def _scatter(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    result = operands[0].copy(order="C")
    values = operands[2].real if operands[2].dtype.kind == "c" and result.dtype.kind not in "cb" else operands[2]
    xp.put_along_axis(result, indices(operands[1]), values.astype(result.dtype), attributes["axis"])
    return (result,)


def _chosen(shape: tuple[int, ...], indices: Specs, axis: int) -> tuple[int, ...]:
    """Shape of ``array[:, …, *indices]``."""
    if not indices or axis + len(indices) > len(shape):
        raise InputError(f"{len(indices)} indices from axis {axis} on for an array with {len(shape)} axes")
    for spec in indices:
        require_integers(spec)
    points = broadcast(*(spec.shape for spec in indices))
    if math.prod(points) and 0 in shape[axis : axis + len(indices)]:
        raise InputError("an indexed axis is empty")
    return (*shape[:axis], *points, *shape[axis + len(indices) :])


def _infer_index(specs: Specs, attributes: Any) -> Specs:
    return like(specs[0], _chosen(specs[0].shape, specs[1:], attributes["axis"]))


def _index(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    key = (*(slice(None),) * attributes["axis"], *map(indices, operands[1:]))
    return (c_order(xp, operands[0][key]),)


def _infer_index_put(specs: Specs, attributes: Any) -> Specs:
    chosen = _chosen(specs[0].shape, specs[2:], attributes["axis"])
    if broadcast(specs[1].shape, chosen) != chosen:
        raise InputError(f"the values do not broadcast to the indexed shape {chosen}")
    return (specs[0],)


def _index_put(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    result, values = operands[0].copy(order="C"), operands[1]
    values = (values.real if values.dtype.kind == "c" and result.dtype.kind not in "cb" else values).astype(
        result.dtype
    )
    key = (*(slice(None),) * attributes["axis"], *map(indices, operands[2:]))
    if attributes["accumulate"]:
        xp.add.at(result, key, values)
    else:
        result[key] = values
    return (result,)


def _infer_unravel(specs: Specs, attributes: Any) -> Specs:
    require_integers(specs[0])
    return (ArraySpec(specs[0].shape, "int64"),) * len(attributes["shape"])


def _unravel(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    return tuple(xp.array(part) for part in xp.unravel_index(indices(operands[0]), attributes["shape"]))


def _infer_ravel(specs: Specs, attributes: Any) -> Specs:
    for spec in specs:
        require_integers(spec)
    check_count("the shape", len(attributes["shape"]), len(specs))
    return (ArraySpec(broadcast(*(spec.shape for spec in specs)), "int64"),)


def _ravel(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    return (xp.ravel_multi_index(tuple(map(indices, operands)), attributes["shape"]),)


def _examples_take() -> Iterator[Example]:
    for dtype in samples.ALL:
        array = samples.sample((4, 3), dtype)
        for index in samples.INTEGERS:
            yield (array, np.asarray([2, 0, 2, 1], index)), {"axis": 1}
        yield (samples.strided(array), np.asarray([[-1, 0]])), {"axis": 0}
        yield (array, np.asarray(3)), {"axis": 0}
        yield (array[:0], np.zeros((0,), "int64")), {"axis": 0}


def _examples_take_along() -> Iterator[Example]:
    for dtype in samples.ALL:
        array = samples.sample((4, 3), dtype)
        yield (array, np.asarray([[2], [0], [-1], [1]])), {"axis": 1}
        yield (samples.strided(array), np.asarray([[0, 3, 1], [1, 1, 0]], "uint8")), {"axis": 0}
        yield (array, np.asarray([[2]], "uint64")), {"axis": 0}


def _examples_scatter() -> Iterator[Example]:
    for (array, index), attributes in _examples_take_along():
        chosen = np.take_along_axis(array, index.astype("int64"), attributes["axis"])
        yield (array, index, chosen + chosen), attributes
        yield (array, index, samples.sample((), "complex64", special=False)), attributes


def _examples_index() -> Iterator[Example]:
    for dtype in samples.ALL:
        array = samples.sample((3, 4, 2), dtype)
        yield (array, np.asarray([2, 0])), {}
        yield (array, np.asarray([[2], [0]]), np.asarray([1, -1, 3])), {"axis": 0}
        yield (samples.strided(array), np.asarray([2, 0], "uint64"), np.asarray(1)), {}
        yield (array, np.asarray([3, 0, 1]), np.asarray([0, 1, 1], "int8")), {"axis": 1}


def _examples_index_put() -> Iterator[Example]:
    for (array, *indices), attributes in _examples_index():
        for values in (samples.sample((), "float32", special=False), samples.sample((1, 2), "int8", special=False)):
            yield (array, values[..., 0:1] if values.ndim and attributes else values, *indices), attributes
            yield (array, np.asarray(1, array.dtype), *indices), {**attributes, "accumulate": True}


def _examples_unravel() -> Iterator[Example]:
    for dtype in samples.INTEGERS:
        for values in (np.asarray(5), np.asarray([[0, 11]]), np.zeros((0,))):
            yield (values.astype(dtype),), {"shape": (3, 4)}


def _examples_ravel() -> Iterator[Example]:
    for dtype in samples.INTEGERS:
        yield (np.asarray([[2], [0]], dtype), np.asarray([1, 3], dtype)), {"shape": (3, 4)}
        yield (np.asarray(2, dtype),), {"shape": (3,)}


OPERATORS: tuple[Operator, ...] = (
    ordered_operator(
        "take",
        "Elements of an axis, by index.",
        INDEXING,
        _infer_take,
        _take,
        _examples_take,
        2,
        attributes={"axis": Axis(0)},
    ),
    ordered_operator(
        "take_along_axis",
        "Elements of an axis, by an index of their own for each slice.",
        INDEXING,
        _infer_take_along,
        lambda xp, o, attributes: (xp.take_along_axis(o[0], indices(o[1]), attributes["axis"]),),
        _examples_take_along,
        2,
        attributes={"axis": Axis(0)},
        workspace=lambda specs, outputs, attributes: 8 * sum(outputs[0].shape) + 8 * math.prod(specs[1].shape),
    ),
    ordered_operator(
        "scatter",
        "A copy of the first operand with the third's elements at the second's indices of an axis.",
        INDEXING,
        _infer_scatter,
        _scatter,
        _examples_scatter,
        3,
        attributes={"axis": Axis(0)},
        workspace=lambda specs, outputs, attributes: nbytes(outputs[0]) + 8 * math.prod(specs[1].shape),
    ),
    ordered_operator(
        "index",
        "Elements at points: operands after the first index consecutive axes from ``axis`` on.",
        INDEXING,
        _infer_index,
        _index,
        _examples_index,
        None,
        least=2,
        attributes={"axis": Axis(0)},
        workspace=lambda specs, outputs, attributes: nbytes(outputs[0]),
    ),
    ordered_operator(
        "index_put",
        "A copy of the first operand with the second put, or added, at points that the others index.",
        INDEXING,
        _infer_index_put,
        _index_put,
        _examples_index_put,
        None,
        least=3,
        attributes={"axis": Axis(0), "accumulate": Bool(False)},
        workspace=lambda specs, outputs, attributes: nbytes(outputs[0]),
    ),
    ordered_operator(
        "unravel_index",
        "Flat indices into an array of that shape as one index for each axis.",
        INDEXING,
        _infer_unravel,
        _unravel,
        _examples_unravel,
        1,
        outputs=None,
        attributes={"shape": Shape()},
        workspace=lambda specs, outputs, attributes: 8 * (1 + len(outputs)) * math.prod(specs[0].shape),
    ),
    ordered_operator(
        "ravel_multi_index",
        "One index for each axis of an array of that shape as flat indices.",
        INDEXING,
        _infer_ravel,
        _ravel,
        _examples_ravel,
        None,
        least=1,
        attributes={"shape": Shape()},
        workspace=lambda specs, outputs, attributes: 8 * len(specs) * math.prod(outputs[0].shape),
    ),
)
