"""Indexing: NumPy's rules, down to slices, `take` and functional updates."""

from __future__ import annotations

import operator
from typing import Any

import numpy

from goblin_dask.errors import NotTraceable
from goblin_dask.graphs.operators.movement import slice_attributes
from goblin_dask.graphs.tracer import casting
from goblin_dask.graphs.tracer.array import Tracer
from goblin_dask.graphs.tracer.casting import broadcast_to, tracer
from goblin_dask.graphs.tracer.recorder import op

np: Any = numpy
"""NumPy, to be called with tracers, which its annotations do not know."""


def parse(shape: tuple[int, ...], index: Any) -> list[Any]:
    """An index as ints, slices, None and integer tracers, one for each axis.

    Raises
    ------
    NotTraceable
        For masks whose elements are not known.
    IndexError
        As NumPy.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    parsed: list[Any] = []
    for item in items:
        if item is None or item is Ellipsis:
            parsed.append(item)
        elif isinstance(item, slice):
            parsed.append(
                slice(*(None if part is None else operator.index(part) for part in (item.start, item.stop, item.step)))
            )
        elif isinstance(item, str) or (isinstance(item, list) and item and isinstance(item[0], str)):
            raise NotTraceable("the function uses a structured array")
        elif isinstance(item, (bool, np.bool_)):
            raise NotTraceable("an index is a single boolean")
        elif isinstance(item, (int, np.integer)):
            parsed.append(int(item))
        else:
            parsed.extend(_array(item))
    if sum(item is Ellipsis for item in parsed) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    taken = sum(item is not None and item is not Ellipsis for item in parsed)
    if taken > len(shape):
        raise IndexError(f"too many indices for array: array is {len(shape)}-dimensional, but {taken} were indexed")
    at = next((i for i, item in enumerate(parsed) if item is Ellipsis), len(parsed))
    return [*parsed[:at], *[slice(None)] * (len(shape) - taken), *parsed[at + 1 :]]


def _array(item: Any) -> list[Any]:
    if isinstance(item, (list, tuple)) and len(item) == 0:
        return [Tracer.of(np.zeros((0,), np.intp))]
    array = tracer(item)
    if array.dtype.kind == "b":
        mask = array.elements("a boolean mask: the shape of the result")
        return [Tracer.of(each, array.literals) for each in mask.nonzero()]
    if array.dtype.kind not in "iu":
        raise IndexError("arrays used as indices must be of integer (or boolean) type")
    if array.ndim == 0 and array.is_known and array.literal is None:
        return [int(array.elements("an index"))]
    return [array]


def getitem(x: Tracer, index: Any) -> Tracer:
    """``x[index]``."""
    items = parse(x.shape, index)
    if not x.is_known or any(isinstance(each, Tracer) and not each.is_known for each in items):
        return _indexed(x, items)
    literals = x.literals.union(*(each.literals for each in items if isinstance(each, Tracer)))
    part = Tracer.of(x._known[tuple(each._known if isinstance(each, Tracer) else each for each in items)], literals)
    if x.literal is not None:  # a part of an input is recorded, so that the program holds for other values too
        part.adopt(_indexed(x, items))
    return part


def _indexed(x: Tracer, items: list[Any]) -> Tracer:
    arrays = [i for i, each in enumerate(items) if isinstance(each, Tracer)]
    if not arrays:
        return _basic(x, items)
    # Beside arrays, integers are arrays too; what matters of that is only where the result's axes stand.
    advanced = [i for i, each in enumerate(items) if isinstance(each, (Tracer, int))]
    together = advanced == list(range(advanced[0], advanced[-1] + 1))
    basic = _basic(x, [slice(None) if isinstance(each, Tracer) else each for each in items])
    kept = [each for each in items if not isinstance(each, int)]
    axes = [i for i, each in enumerate(kept) if isinstance(each, Tracer)]
    first = sum(not isinstance(each, int) for each in items[: advanced[0]])
    result = _take(basic, axes, [kept[i] for i in axes])  # the new axes stand at axes[0]
    new = len(np.broadcast_shapes(*(kept[i].shape for i in axes)))
    target = first if together else 0
    return (
        result
        if target == axes[0] or not new
        else np.moveaxis(result, tuple(range(axes[0], axes[0] + new)), tuple(range(target, target + new)))
    )


def _basic(x: Tracer, items: list[Any]) -> Tracer:
    """Slices, integers and new axes."""
    parts: list[slice] = []
    gone: list[int] = []
    new: list[int] = []
    for place, item in enumerate(items):
        axis = len(parts)
        if item is None:
            new.append(place - len(gone))
        elif isinstance(item, int):
            n = x.shape[axis]
            if not -n <= item < n:
                raise IndexError(f"index {item} is out of bounds for axis {axis} with size {n}")
            parts.append(slice(item % n, item % n + 1))
            gone.append(axis)
        else:
            parts.append(item)
    attributes = slice_attributes(tuple(parts), x.shape)
    result = x
    if attributes["length"] != x.shape or any(step != 1 for step in attributes["step"]):
        result = op("slice", x, **attributes)
    if gone:
        result = op("squeeze", result, axes=tuple(gone))
    if new:
        result = op("expand_dims", result, axes=tuple(new))
    return x.copy() if result is x else result


def _take(x: Tracer, axes: list[int], arrays: list[Tracer]) -> Tracer:
    """Index axes with arrays; the axes of the result stand where the first of them stood."""
    if len(axes) == 1:
        (axis,), (index,) = axes, arrays
        if index.is_known and index.literal is None:
            _check_bounds(index._known, x.shape[axis], axis)
        return op("take", x, index, axis=axis)
    for axis, index in zip(axes, arrays, strict=True):
        if index.is_known and index.literal is None:
            _check_bounds(index._known, x.shape[axis], axis)
    rest = [i for i in range(x.ndim) if i not in axes]
    order = [*rest[: axes[0]], *axes, *rest[axes[0] :]]
    return op("index", np.transpose(x, order), *arrays, axis=axes[0])


def _check_bounds(index: Any, n: int, axis: int) -> None:
    if index.size and not (-n <= index.min() and index.max() < n):
        raise IndexError(f"index is out of bounds for axis {axis} with size {n}")


def setitem(x: Tracer, index: Any, value: Any) -> None:
    """``x[index] = value``: `x` stands for the changed array from now on."""
    if isinstance(index, Tracer) and index.dtype.kind == "b" and not index.is_known:
        value = tracer(value, x.dtype)
        if value.size != 1:
            raise NotTraceable("several values are assigned to a boolean mask")
        mask = casting.reshape(index, index.shape + (1,) * (x.ndim - index.ndim))
        x.become(op("where", mask, casting.reshape(value, ()), x))
        return
    items = parse(x.shape, index)
    value = tracer(value, x.dtype)
    if x.is_known and value.is_known and all(not isinstance(each, Tracer) or each.is_known for each in items):
        _set_known(x, items, value)
        return
    if any(isinstance(each, Tracer) for each in items):
        _scatter(x, items, value)
        return
    parts = tuple(each for each in items if each is not None)
    for i, (each, n) in enumerate(zip(parts, x.shape, strict=True)):
        if isinstance(each, int) and not -n <= each < n:
            raise IndexError(f"index {each} is out of bounds for axis {i} with size {n}")
    ranges = tuple(
        slice(each % n, each % n + 1) if isinstance(each, int) else each for each, n in zip(parts, x.shape, strict=True)
    )
    attributes = slice_attributes(ranges, x.shape)
    lengths = attributes["length"]
    target: list[int] = []
    sizes = iter(zip(parts, lengths, strict=True))
    for item in items:
        if item is None:
            target.append(1)
        else:
            each, length = next(sizes)
            if not isinstance(each, int):
                target.append(length)
    while value.ndim > len(target) and value.shape[0] == 1:
        value = casting.reshape(value, value.shape[1:])
    if np.broadcast_shapes(value.shape, tuple(target)) != tuple(target):
        raise ValueError(f"could not broadcast input array from shape {value.shape} into shape {tuple(target)}")
    if 0 in lengths:
        return
    if len(target) != len(lengths) or tuple(target) != lengths:
        value = casting.reshape(broadcast_to(value, tuple(target)), lengths)
    whole = lengths == x.shape and all(step == 1 for step in attributes["step"])
    x.become(broadcast_to(value, x.shape) if whole else op("setitem", x, value, **attributes))


def _set_known(x: Tracer, items: list[Any], value: Tracer) -> None:
    """Everything is known, so the result is."""
    changed = x._known.copy()
    changed[tuple(each._known if isinstance(each, Tracer) else each for each in items)] = value._known
    literals = x.literals.union(value.literals, *(each.literals for each in items if isinstance(each, Tracer)))
    x.become(Tracer.of(changed, literals))


def _scatter(x: Tracer, items: list[Any], value: Tracer) -> None:
    """Assignment through strides and arrays of known integers: every element chooses where it comes from."""
    if x.size > 2**24:
        raise NotTraceable("an assignment through an index array into a large array")
    known = tuple(
        each.elements("assignment through an index array") if isinstance(each, Tracer) else each for each in items
    )
    places = np.arange(x.size).reshape(x.shape)[known]
    value = broadcast_to(value, places.shape) if value.shape != places.shape else value
    sources = np.arange(x.size)
    sources[places] = x.size + np.arange(places.size).reshape(places.shape)
    both = np.concatenate([casting.reshape(x, (x.size,)), casting.reshape(value, (value.size,))])
    x.become(casting.reshape(op("take", both, Tracer.of(sources), axis=0), x.shape))
