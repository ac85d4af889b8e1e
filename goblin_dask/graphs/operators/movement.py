"""Operators that move elements and compute none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from goblin_dask.errors import InputError
from goblin_dask.graphs.operators import samples
from goblin_dask.graphs.operators.base import Attributes, Example, Kind, Operator, Specs, broadcast, check_count, like
from goblin_dask.graphs.operators.dtypes import DTYPES, common
from goblin_dask.graphs.operators.rules import Axes, Axis, DType, Int, Ints, Shape
from goblin_dask.messages import ArraySpec

MOVEMENT = frozenset({Kind.MOVEMENT})


def slice_attributes(index: tuple[slice, ...], shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Canonical attributes of `slice` and `setitem` for slices of some, or all, leading axes of an array."""
    starts, lengths, steps = [], [], []
    for part, size in zip((*index, *(slice(None),) * (len(shape) - len(index))), shape, strict=True):
        elements = range(size)[part]
        length = len(elements)
        starts.append(elements.start if length else 0)
        lengths.append(length)
        steps.append(elements.step if length > 1 else 1)
    return {"start": tuple(starts), "length": tuple(lengths), "step": tuple(steps)}


def _index(attributes: Any) -> tuple[slice, ...]:
    """The attributes of a slice as slices."""
    parts = []
    for start, length, step in zip(attributes["start"], attributes["length"], attributes["step"], strict=True):
        stop = start + step * length
        parts.append(slice(start, stop if stop >= 0 else None, step))
    return tuple(parts)


def _checked_slice(shape: tuple[int, ...], attributes: Any) -> tuple[int, ...]:
    start, length, step = attributes["start"], attributes["length"], attributes["step"]
    for name, entries in (("start", start), ("length", length), ("step", step)):
        check_count(name, len(entries), len(shape))
    for axis, (first, count, by, size) in enumerate(zip(start, length, step, shape, strict=True)):
        if count == 0:
            valid = first == 0 and by == 1
        elif count == 1:
            valid = first < size and by == 1
        else:
            valid = by != 0 and first < size and 0 <= first + by * (count - 1) < size
        if not valid:
            raise InputError(f"start {first}, length {count}, step {by} in axis {axis} of length {size}")
    return tuple(length)


def movement(
    name: str,
    summary: str,
    infer: Callable[[Specs, Any], Specs],
    kernel: Callable[[Any, tuple[Any, ...], Any], Any],
    examples: Callable[[], Iterator[Example]],
    **more: Any,
) -> Operator:
    def wrapped(xp: Any, operands: tuple[Any, ...], attributes: Attributes) -> tuple[Any, ...]:
        return (kernel(xp, operands, attributes),)

    return Operator(name, summary, more.pop("kinds", MOVEMENT), infer, wrapped, examples, **more)


def _always(specs: Specs, attributes: Attributes) -> bool:
    return True


def _infer_reshape(specs: Specs, attributes: Any) -> Specs:
    shape, size = attributes["shape"], math.prod(specs[0].shape)
    if math.prod(shape) != size:
        raise InputError(f"{size} elements do not have the shape {shape}")
    return like(specs[0], shape)


def _infer_permute(specs: Specs, attributes: Any) -> Specs:
    axes = attributes["axes"]
    check_count("axes", len(axes), len(specs[0].shape))
    return like(specs[0], tuple(specs[0].shape[axis] for axis in axes))


def _infer_expand(specs: Specs, attributes: Any) -> Specs:
    axes, sizes = attributes["axes"], iter(specs[0].shape)
    rank = len(specs[0].shape) + len(axes)
    return like(specs[0], tuple(1 if axis in axes else next(sizes) for axis in range(rank)))


def _infer_squeeze(specs: Specs, attributes: Any) -> Specs:
    axes, shape = attributes["axes"], specs[0].shape
    for axis in axes:
        if shape[axis] != 1:
            raise InputError(f"axis {axis} has length {shape[axis]}, not 1")
    return like(specs[0], tuple(size for axis, size in enumerate(shape) if axis not in axes))


def _infer_concat(specs: Specs, attributes: Any) -> Specs:
    axis, shape = attributes["axis"], specs[0].shape
    for spec in specs:
        rest = spec.shape[:axis] + spec.shape[axis + 1 :]
        if len(spec.shape) != len(shape) or rest != shape[:axis] + shape[axis + 1 :]:
            raise InputError(f"{shape} and {spec.shape} differ in another axis than {axis}")
    total = sum(spec.shape[axis] for spec in specs)
    dtype = common(*(spec.dtype for spec in specs))
    return (ArraySpec((*shape[:axis], total, *shape[axis + 1 :]), dtype),)


def _infer_stack(specs: Specs, attributes: Any) -> Specs:
    axis, shape = attributes["axis"], specs[0].shape
    for spec in specs:
        if spec.shape != shape:
            raise InputError(f"{shape} and {spec.shape} differ")
    dtype = common(*(spec.dtype for spec in specs))
    return (ArraySpec((*shape[:axis], len(specs), *shape[axis:]), dtype),)


def _joined(name: str) -> Callable[[Any, tuple[Any, ...], Any], Any]:
    def kernel(xp: Any, operands: tuple[Any, ...], attributes: Any) -> Any:
        kinds = {operand.dtype.name for operand in operands}
        if len(kinds) > 1:
            dtype = DTYPES[common(*(operand.dtype.name for operand in operands))]
            operands = tuple(operand.astype(dtype, copy=False) for operand in operands)
        return getattr(xp, name)(operands, axis=attributes["axis"])

    return kernel


def _infer_broadcast(specs: Specs, attributes: Any) -> Specs:
    shape = attributes["shape"]
    if broadcast(specs[0].shape, shape) != shape:
        raise InputError(f"it does not broadcast to {shape}")
    return like(specs[0], shape)


def _same(specs: Specs, attributes: Any) -> Specs:
    return (specs[0],)


def _infer_roll(specs: Specs, attributes: Any) -> Specs:
    check_count("shift", len(attributes["shift"]), len(attributes["axes"]))
    return (specs[0],)


def _without_gaps(specs: Specs, attributes: Any) -> bool:
    """Whether a slice is one run of memory: single elements of the first axes, a part of one, the others whole."""
    sizes, lengths = specs[0].shape, attributes["length"]
    cut = next((axis for axis, length in enumerate(lengths) if length != 1), len(sizes))
    return lengths[cut + 1 :] == sizes[cut + 1 :] and all(step == 1 for step in attributes["step"])


def _infer_slice(specs: Specs, attributes: Any) -> Specs:
    return like(specs[0], _checked_slice(specs[0].shape, attributes))


def _infer_setitem(specs: Specs, attributes: Any) -> Specs:
    region = _checked_slice(specs[0].shape, attributes)
    if broadcast(specs[1].shape, region) != region:
        raise InputError(f"the value does not broadcast to the region's shape {region}")
    return (specs[0],)


def _cast(array: Any, dtype: Any) -> Any:
    """Assignment casts as `astype` does, without a warning for complex numbers."""
    return (array.real if array.dtype.kind == "c" and dtype.kind not in "cb" else array).astype(dtype, copy=False)


def _setitem(xp: Any, operands: tuple[Any, ...], attributes: Any) -> Any:
    result = operands[0].copy(order="C")
    result[_index(attributes)] = _cast(operands[1], result.dtype)
    return result


def _setitem_into(xp: Any, operands: tuple[Any, ...], attributes: Any, out: Any) -> None:
    if out is not operands[0]:
        out[...] = operands[0]
    out[_index(attributes)] = _cast(operands[1], out.dtype)


def _infer_diagonal(specs: Specs, attributes: Any) -> Specs:
    first, second, offset = attributes["axis1"], attributes["axis2"], attributes["offset"]
    if first == second:
        raise InputError("the two axes are the same")
    shape = specs[0].shape
    rows, columns = shape[first], shape[second]
    length = max(0, min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns))
    return like(specs[0], (*(size for axis, size in enumerate(shape) if axis not in (first, second)), length))


def _infer_bitcast(specs: Specs, attributes: Any) -> Specs:
    old, new = DTYPES[specs[0].dtype].itemsize, DTYPES[attributes["dtype"]].itemsize
    if attributes["dtype"] == "bool":
        raise InputError("arbitrary bytes are not booleans")
    shape = specs[0].shape
    if old != new and (not shape or shape[-1] * old % new):
        raise InputError(f"the last axis does not hold a whole number of {attributes['dtype']}")
    return (ArraySpec(shape if old == new else (*shape[:-1], shape[-1] * old // new), attributes["dtype"]),)


def examples_of(
    *choices: tuple[tuple[int, ...], dict[str, Any]], operands: int = 1, dtypes: Any = samples.ALL
) -> Callable[[], Iterator[Example]]:
    def examples() -> Iterator[Example]:
        for i, (shape, attributes) in enumerate(choices):
            for dtype in dtypes if i == 0 else ("float32", "int8"):
                array = samples.sample(shape, dtype, i)
                yield (array,) * operands, attributes
                yield (samples.strided(array),) * operands, attributes

    return examples


def _examples_join() -> Iterator[Example]:
    for dtype in samples.ALL:
        for shape in ((3,), (2, 3), (0, 2)):
            yield (samples.sample(shape, dtype), samples.strided(samples.sample(shape, "int8"))), {"axis": -1}
    yield (samples.sample((2, 3), "float32"),) * 5, {"axis": 0}
    yield (samples.sample((1,), "bfloat16"),), {"axis": 0}


def _examples_concat() -> Iterator[Example]:
    yield from _examples_join()
    yield (
        (samples.sample((2, 3), "float32"), samples.sample((0, 3), "float64"), samples.sample((4, 3), "bool")),
        {"axis": 0},
    )


def _examples_slice() -> Iterator[Example]:
    for dtype in samples.ALL:
        array = samples.sample((6, 7), dtype)
        yield (array,), slice_attributes((slice(1, None, 2),), array.shape)
    for index in (np.s_[::-1, ::3], np.s_[5:1:-2, 6::-3], np.s_[3:3, :], np.s_[2:3, -1:]):
        yield (samples.strided(array),), slice_attributes(index, array.shape)
    yield (samples.sample((), "float32"),), slice_attributes((), ())


def _examples_setitem() -> Iterator[Example]:
    for (array,), attributes in _examples_slice():
        yield (array, samples.sample((), "float32", special=False)), attributes
        yield (array, samples.sample(attributes["length"][-1:], "complex64", special=False)), attributes


OPERATORS: tuple[Operator, ...] = (
    movement(
        "reshape",
        "Another shape for the same elements in C order.",
        _infer_reshape,
        lambda xp, operands, attributes: operands[0].reshape(attributes["shape"]),
        examples_of(
            ((6, 4), {"shape": (2, 12)}), ((), {"shape": (1, 1)}), ((2, 0), {"shape": (0, 7)}), ((1,), {"shape": ()})
        ),
        attributes={"shape": Shape()},
        idle=True,
        view=_always,
        keeps_order=True,
    ),
    movement(
        "permute_dims",
        "Axes in another order.",
        _infer_permute,
        lambda xp, operands, attributes: operands[0].transpose(attributes["axes"]),
        examples_of(
            ((3, 4), {"axes": (1, 0)}), ((2, 0, 3), {"axes": (2, 0, 1)}), ((), {"axes": ()}), ((5,), {"axes": (-1,)})
        ),
        attributes={"axes": Axes(ordered=True)},
        view=_always,
        permutes=True,
    ),
    movement(
        "expand_dims",
        "New axes of length one, at these places of the result.",
        _infer_expand,
        lambda xp, operands, attributes: xp.expand_dims(operands[0], attributes["axes"]),
        examples_of(((3, 4), {"axes": (1,)}), ((), {"axes": (0, 1)}), ((2, 3), {"axes": (-1, 0)}), ((0,), {"axes": 0})),
        attributes={"axes": Axes(grows=True)},
        idle=True,
        view=_always,
        keeps_order=True,
    ),
    movement(
        "squeeze",
        "These axes, of length one, taken away.",
        _infer_squeeze,
        lambda xp, operands, attributes: xp.squeeze(operands[0], attributes["axes"]),
        examples_of(((3, 1), {"axes": -1}), ((1, 1), {"axes": (0, 1)}), ((1, 0, 1), {"axes": (2,)})),
        attributes={"axes": Axes()},
        idle=True,
        view=_always,
        keeps_order=True,
    ),
    movement(
        "concat",
        "Arrays joined along an axis.",
        _infer_concat,
        _joined("concatenate"),
        _examples_concat,
        arity=None,
        least=1,
        attributes={"axis": Axis(default=0)},
        contiguous=True,
    ),
    movement(
        "stack",
        "Arrays joined along a new axis.",
        _infer_stack,
        _joined("stack"),
        _examples_join,
        arity=None,
        least=1,
        attributes={"axis": Axis(default=0, extra=1)},
        contiguous=True,
    ),
    movement(
        "broadcast_to",
        "The array repeated, without a copy, to a larger shape.",
        _infer_broadcast,
        lambda xp, operands, attributes: xp.broadcast_to(operands[0], attributes["shape"]),
        examples_of(((3, 1), {"shape": (2, 3, 4)}), ((), {"shape": (2,)}), ((1,), {"shape": (0,)})),
        attributes={"shape": Shape()},
        idle=True,
        view=_always,
    ),
    movement(
        "flip",
        "Axes reversed.",
        _same,
        lambda xp, operands, attributes: xp.flip(operands[0], attributes["axes"]),
        examples_of(((3, 4), {"axes": 1}), ((2, 3), {"axes": None}), ((), {"axes": ()}), ((0,), {"axes": 0})),
        attributes={"axes": Axes()},
        view=_always,
    ),
    movement(
        "roll",
        "Elements moved along axes, those that fall off entering at the other end.",
        _infer_roll,
        lambda xp, operands, attributes: xp.roll(operands[0], attributes["shift"], attributes["axes"]),
        examples_of(
            ((3, 4), {"shift": 2, "axes": 1}),
            ((3, 4), {"shift": (-1, 9), "axes": (1, 0)}),
            ((0,), {"shift": 1, "axes": 0}),
        ),
        attributes={"shift": Ints(), "axes": Axes(ordered=True)},
    ),
    movement(
        "slice",
        "Every ``step``-th element of each axis from ``start`` on, ``length`` of them.",
        _infer_slice,
        lambda xp, operands, attributes: operands[0][_index(attributes)],
        _examples_slice,
        attributes={"start": Ints(low=0), "length": Ints(low=0), "step": Ints()},
        view=_always,
        unbroken=_without_gaps,
    ),
    movement(
        "setitem",
        "A copy of the first operand in which a slice is replaced by the second.",
        _infer_setitem,
        _setitem,
        _examples_setitem,
        arity=2,
        attributes={"start": Ints(low=0), "length": Ints(low=0), "step": Ints()},
        into=_setitem_into,
        reusable=(0,),
        contiguous=True,
    ),
    movement(
        "diagonal",
        "Diagonals of two axes, as the last axis.",
        _infer_diagonal,
        lambda xp, operands, a: xp.diagonal(operands[0], a["offset"], a["axis1"], a["axis2"]),
        examples_of(((3, 4), {}), ((3, 4, 2), {"offset": -1, "axis1": 2, "axis2": 0}), ((2, 2), {"offset": 5})),
        attributes={"offset": Int(0), "axis1": Axis(0), "axis2": Axis(1)},
        view=_always,
    ),
    movement(
        "bitcast",
        "The same bytes as another dtype, along the last axis.",
        _infer_bitcast,
        lambda xp, operands, a: xp.ascontiguousarray(operands[0]).reshape(operands[0].shape).view(DTYPES[a["dtype"]]),
        examples_of(
            ((3, 8), {"dtype": "uint8"}),
            ((), {"dtype": "float32"}),
            ((0,), {"dtype": "int64"}),
            dtypes=samples.INTEGERS,
        ),
        attributes={"dtype": DType()},
        view=_always,
        keeps_order=True,
    ),
)
